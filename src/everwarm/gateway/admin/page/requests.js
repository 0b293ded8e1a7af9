// The last requests, the newest first; each opens to its timeline and the reason why it read what it read.

import { h } from "./dom.js";
import { reuseBar, whyCard } from "./parts.js";
import { SHORT_REASONS, ago, count, duration } from "./words.js";

const MOST_SHOWN = 60;

export class Requests {
  constructor(feed) {
    this.feed = feed;
    this.open = null; // an id
    this._shown = new Map(); // id → {words, element}
    this.element = h("ul", { class: "requests", "aria-label": "Requests" });
  }

  show() {
    const rows = [...this.feed.requests.values()].reverse().slice(0, MOST_SHOWN);
    const elements = rows.map((row) => this._item(row));
    this._shown = new Map(rows.map((row, nth) => [row.id, elements[nth]]));
    const wanted = elements.map((each) => each.element);
    const isSame = wanted.length === this.element.children.length && wanted.every((each, nth) => each === this.element.children[nth]);
    if (!isSame) this.element.replaceChildren(...(wanted.length ? wanted : [h("li", { class: "muted" }, "None yet.")]));
  }

  /** The element of before where nothing about the request is new, so that focus and scrolling stay. */
  _item(row) {
    const words = JSON.stringify([row, this.open === row.id, ago(row.at)]);
    const before = this._shown.get(row.id);
    if (before?.words === words) return before;
    const fresh = this._made(row);
    if (before) {
      const hadFocus = before.element.contains(document.activeElement);
      before.element.replaceChildren(...fresh.childNodes);
      if (hadFocus) before.element.querySelector("button").focus();
      return { words, element: before.element };
    }
    return { words, element: fresh };
  }

  _made(row) {
    const isOpen = this.open === row.id;
    const toggle = () => { this.open = isOpen ? null : row.id; this.show(); };
    const counts = `${count(row.n_cached)} reused · ${count(row.n_read)} read · ${count(row.n_reply)} written`;
    const reason = row.reason ? SHORT_REASONS[row.reason] ?? row.reason : row.status;
    const line = h("button", { type: "button", "aria-expanded": String(isOpen), on: { click: toggle } },
      h("span", { class: "when muted" }, ago(row.at)),
      h("span", { class: "bar-cell" }, reuseBar(row.n_cached, row.n_read), h("span", { class: "counts number" }, counts)),
      h("span", { class: `reason status-${row.status}` }, reason),
      h("span", { class: "ttft number" }, row.ttft_ms === null ? "–" : duration(row.ttft_ms)));
    return h("li", { "data-id": row.id }, line, isOpen ? this._details(row) : null);
  }

  _details(row) {
    const card = whyCard(row.cache, row.n_cached, row.n_read, row.phases);
    const about = [row.path, row.model, row.slot === null ? null : `slot ${row.slot}`, row.id].filter(Boolean).join(" · ");
    card.append(h("p", { class: "muted" }, about));
    if (row.error) card.prepend(h("p", { class: "wrong" }, row.error));
    return card;
  }
}
