// The header's promise: how much was warm, what was not read and the time that saved; after a start, what is still warm.

import { json } from "./api.js";
import { h } from "./dom.js";
import { countEnds, layout } from "./layout.js";
import { clock, promised } from "./words.js";

const MOST_NODES = 1000; // one page of the tree

export class Headline {
  constructor(element, feed) {
    this.element = element;
    this.feed = feed;
    this.n_kept = 0; // conversations that were kept when the server had answered nothing yet
    this._countedFor = null;
    this._lostAt = null;
    feed.addEventListener("stats", () => { this.show(); this._count(); });
  }

  /** Figures of a server that is gone stay, but are shown as old. */
  set isLost(isLost) {
    this._lostAt = isLost ? this._lostAt ?? this.feed.overviewAt : null;
    this.show();
  }

  show() {
    const { overview } = this.feed;
    const parts = overview ? promised(overview, this.n_kept) : [["", "…", ""]];
    if (this._lostAt) parts.unshift(["stale", `as of ${clock(this._lostAt)}`, ""]);
    const shown = parts.map(([kind, figure, words]) => h("span", { class: kind || null }, figure && h("b", {}, figure), words && ` ${words}`));
    this.element.replaceChildren(...shown);
    this.element.toggleAttribute("data-stale", this._lostAt !== null);
  }

  /** Once for each start of the server, while it has answered nothing: what an earlier one left. */
  async _count() {
    const { overview } = this.feed;
    if (!overview || overview.requests.total > 0 || overview.version === null || this._countedFor === overview.model) return;
    this._countedFor = overview.model;
    const page = await json(`/cache/tree?model=${encodeURIComponent(overview.model)}&limit=${MOST_NODES}`).catch(() => null);
    this.n_kept = page ? countEnds(layout(page.nodes).places.values()) : 0;
    this.show();
    this.feed.dispatchEvent(new Event("kept"));
  }
}
