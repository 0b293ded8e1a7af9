// The tree view: the picture, moving around in it, one node's details, and orders to pin or drop it.

import { json } from "./api.js";
import { forget } from "./colours.js";
import { button, find, h, say, twice } from "./dom.js";
import { layout, nearest } from "./layout.js";
import { TreeData } from "./treedata.js";
import { TreeDrawing } from "./treedraw.js";
import { ago, bytes, count, tierName, tierPlace, trouble } from "./words.js";

const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const FRAME_MS = 80;

export class Tree {
  constructor(root, feed) {
    this.feed = feed;
    this.isShown = false;
    this.picture = layout([]);
    this.hover = null;
    this.selected = null; // an id: it may move when the tree changes
    this.span = null; // the part of the trunk that a message is
    this.around = null; // () => {talks, open}: the conversations of this browser
    this.wanted = () => {}; // called with a conversation that shall be opened
    this.pointed = () => {}; // called with the ids of the messages under the pointer
    this._at = new Map(); // where running requests are shown, in tokens
    this._frame = 0;
    this._build(root);
    this.drawing = new TreeDrawing(this.canvas);
    this.data = new TreeData((picture, error) => this._changed(picture, error));
    this._listen();
  }

  _build(root) {
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": "Prefix tree. Arrows walk from node to node.", id: "tree-canvas" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.card = h("div", { class: "node-card", hidden: true, role: "group", "aria-label": "Node" });
    this.empty = h("div", { class: "tree-empty", hidden: true });
    this.counted = h("span", { class: "count number", id: "tree-count" });
    this.every = button("Every node", { class: "plain", id: "every-node", "aria-pressed": "false", title: "Every node on a place of its own, or the open conversation with the others as rows" }, () => this._toggleEvery());
    const zoom = (factor) => this.zoom(factor);
    const legend = ["device", "ram", "disk"].map((tier) => h("span", { class: `chip ${tier}` }, tierName(tier)));
    root.append(
      h("div", { class: "tree-head" }, h("h2", {}, "Prefix tree"), this.counted,
        h("div", { class: "row-end" }, button("−", { class: "icon", "aria-label": "Zoom out" }, () => zoom(1 / 1.4)),
          button("+", { class: "icon", "aria-label": "Zoom in" }, () => zoom(1.4)), button("Fit", { class: "plain", title: "Show all of it (0)" }, () => this.fit()), this.every)),
      h("div", { class: "tree-stage" }, this.canvas, this.empty,
        h("div", { class: "legend" }, legend, h("span", { class: "chip running" }, "running")), this.tip, this.card));
  }

  _listen() {
    const { canvas, feed } = this;
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => this._hoverOn(null));
    canvas.addEventListener("pointerdown", (event) => this._down(event));
    canvas.addEventListener("pointerup", (event) => this._up(event));
    canvas.addEventListener("pointercancel", () => { this._fingers?.clear(); });
    canvas.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this._key(event));
    new ResizeObserver(() => { this._fitOnce(); this.redraw(true); }).observe(canvas);
    feed.addEventListener("tree", () => this._refresh());
    feed.addEventListener("stats", () => this._refreshFirst());
    feed.addEventListener("request", (event) => { if (event.detail.n_reply === 0) this._refresh(); this.redraw(false); });
    this._fingers = new Map();
  }

  // what there is

  /** Shows the tree around the open conversation. */
  follow(around) {
    this.around = () => ({ ...around(), namespace: this.feed.overview?.caller?.namespace ?? "" });
    this.data.around = this.around;
  }

  /** The open conversation has changed. */
  rearrange() {
    if (this.isShown && this.data.nodes.length) this.data.arrange();
  }

  _toggleEvery() {
    const isEvery = this.data.around !== null;
    this.data.around = isEvery ? null : this.around;
    this.every.setAttribute("aria-pressed", String(isEvery));
    this.drawing.camera.isMoved = false;
    this.data.arrange();
  }

  /** Marks what a message is in the tree; null: nothing. */
  point(id) {
    this.span = this.picture.turns?.find((turn) => turn.ids.includes(id)) ?? null;
    this.redraw(false);
  }

  choose(model) {
    this.data.choose(model);
    this.selected = null;
    this._changed(this.data.picture, null);
    this._refresh();
  }

  show(isShown) {
    this.isShown = isShown;
    if (isShown) this._refresh();
    else this.data.stop();
  }

  /** Sends no requests for a model that does not run. */
  _refresh() {
    if (!this.isShown || document.hidden || !this.feed.overview) return;
    if (this.feed.overview.version === null) this._changed(layout([]), null);
    else this.data.refresh();
  }

  _refreshFirst() {
    const version = this.feed.overview?.version;
    if (version !== this._version) this._refresh();
    this._version = version;
  }

  _changed(picture, error) {
    this.picture = picture;
    const n = picture.places.size;
    const others = picture.labels ? `${count(picture.labels.length)} beside it` : `${count(picture.rows.length)} ends`;
    this.counted.textContent = n ? `${count(n)} nodes · ${others} · ${count(picture.n_tokens)} tokens deep` : "";
    this.every.hidden = !picture.labels && this.data?.around !== null;
    this.empty.hidden = !error && n > 0;
    const isAsleep = this.feed.overview?.version === null;
    const nothing = isAsleep ? "The model is not loaded. What it keeps can be seen when it is." : "Nothing is kept yet. Say something in the chat.";
    this.empty.replaceChildren(h("p", {}, error ? trouble(error) : nothing));
    this._fitOnce();
    this._showCard();
    this.redraw(true);
  }

  // drawing

  recolour() {
    forget();
    this.redraw(true);
  }

  redraw(isStale) {
    if (isStale && this.drawing) this.drawing.isStale = true;
    if (!this._frame && this.isShown) this._frame = requestAnimationFrame((now) => this.drawNow(now));
  }

  drawNow(now = performance.now()) {
    this._frame = 0;
    const running = this.running();
    const selected = this.picture.places.get(this.selected) ?? null;
    this.drawing.draw(this.picture, { hover: this.hover, selected, span: this.span, running }, CALM.matches ? 0 : now);
    if (running.length && this.isShown && !document.hidden && !CALM.matches) setTimeout(() => this.redraw(false), FRAME_MS);
  }

  /** Where requests are: the node from the tree, the token from the request's own news; moved there smoothly. */
  running() {
    const found = [];
    for (const place of this.picture.places.size > 0 ? this._runningPlaces() : []) {
      const { request, at } = place.node.running;
      const row = this.feed.requests.get(request);
      if (row && row.status !== "running") continue;
      const target = row ? Math.max(at, row.n_cached + row.n_read + row.n_reply) : at;
      const before = this._at.get(request) ?? at;
      const shown = CALM.matches ? target : before + (target - before) * 0.25;
      this._at.set(request, shown);
      found.push({ place, x: this.picture.axis.at(Math.max(shown, place.node.start)) });
    }
    if (!found.length) this._at.clear();
    return found;
  }

  _runningPlaces() {
    if (this._runningOf !== this.picture) {
      this._runningOf = this.picture;
      this._runningFound = [...this.picture.places.values()].filter((place) => place.node.running);
    }
    return this._runningFound;
  }

  // moving around

  _fitOnce() {
    if (!this.drawing || this.drawing.camera.isMoved) return;
    const { width, height } = this.canvas.getBoundingClientRect();
    this.drawing.camera.fit(this.picture, width, height);
  }

  fit() {
    this.drawing.camera.isMoved = false;
    this._fitOnce();
    this.redraw(true);
  }

  zoom(factor, px, py) {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.drawing.camera.zoom(factor, px ?? width / 2, py ?? height / 2);
    this.redraw(true);
  }

  _wheel(event) {
    event.preventDefault();
    if (event.shiftKey) { this.drawing.camera.pan(-event.deltaY - event.deltaX, 0); this.redraw(true); return; }
    this.zoom(Math.exp(-Math.max(-200, Math.min(200, event.deltaY)) / 400), event.offsetX, event.offsetY);
  }

  _down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this._fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this._moved = 0;
  }

  move(event) {
    const finger = this._fingers.get(event.pointerId);
    if (!finger) return this._hoverOn(this.at(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    const before = this._spread();
    const [dx, dy] = [event.offsetX - finger.x, event.offsetY - finger.y];
    Object.assign(finger, { x: event.offsetX, y: event.offsetY });
    this._moved += Math.abs(dx) + Math.abs(dy);
    if (this._fingers.size === 2 && before > 0) return this.zoom(this._spread() / before, event.offsetX, event.offsetY);
    if (this._moved > 3) { this.drawing.camera.pan(dx, dy); this.redraw(true); }
  }

  _spread() {
    const [a, b] = [...this._fingers.values()];
    return a && b ? Math.hypot(a.x - b.x, a.y - b.y) : 0;
  }

  _up(event) {
    this._fingers.delete(event.pointerId);
    if (this._moved <= 3) this.select(this.at(event.offsetX, event.offsetY));
  }

  /** The node under a pixel, or none. */
  at(px, py) {
    const { camera } = this.drawing;
    const reach = Math.max(0, Math.ceil(6 / camera.row) - 1);
    const [row, x] = [camera.rowAt(py), camera.x_at(px)];
    for (let off = 0; off <= reach; off += 1) {
      for (const each of off ? [row - off, row + off] : [row]) {
        const place = nearest(this.picture.rows, each, x - 7 / camera.scale);
        if (place && px >= camera.px(place.from) - 8 && px <= camera.px(place.to) + 9) return place;
      }
    }
    return null;
  }

  _hoverOn(place, px = 0, py = 0) {
    if (place !== this.hover) {
      this.hover = place;
      const turn = place?.row === 0 ? this.picture.turns?.find(({ start, end }) => place.node.end > start && place.node.end <= end) : null;
      this.pointed(turn?.ids ?? []);
      this.redraw(false);
    }
    this.canvas.classList.toggle("over", place !== null);
    this.tip.hidden = place === null;
    if (!place) return;
    const { node } = place;
    const name = this.picture.labels?.find((label) => label.row === place.row)?.words;
    this.tip.replaceChildren(name ? h("div", {}, h("b", {}, name)) : "", h("div", {}, summary(node)), node.words ? h("div", { class: "words" }, node.words.slice(0, 160)) : "");
    const { width, height } = this.canvas.getBoundingClientRect();
    this.tip.style.left = `${Math.min(px + 14, Math.max(0, width - 250))}px`;
    this.tip.style.top = `${Math.min(py + 14, height - 80)}px`;
  }

  _key(event) {
    const zooms = { "+": 1.3, "=": 1.3, "-": 1 / 1.3 };
    if (zooms[event.key]) this.zoom(zooms[event.key]);
    else if (event.key === "0") this.fit();
    else if (event.key === "p") this._pin();
    else if (event.key === "Escape") this.select(null);
    else if (event.key.startsWith("Arrow")) this._walk(event.key);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  _walk(key) {
    const { rows, places } = this.picture;
    const here = places.get(this.selected) ?? rows[0]?.[0];
    if (!here) return;
    const above = () => nearest(rows, here.row - 1, here.to);
    const below = () => nearest(rows, here.row + 1, here.to);
    const to = { ArrowLeft: () => here.parent, ArrowRight: () => here.children[0], ArrowUp: above, ArrowDown: below }[key]();
    this.select(to ?? here);
  }

  // one node

  select(place) {
    this.selected = place?.node.id ?? null;
    this._showCard();
    this.redraw(false);
    if (place) say(summary(place.node));
  }

  _showCard() {
    const place = this.picture.places.get(this.selected);
    const node = place?.node;
    const talk = this.picture.labels?.find((label) => label.row === place?.row)?.talk;
    this.card.hidden = !node;
    const shown = JSON.stringify([node ?? null, talk?.id]);
    if (!node || shown === this._shownNode) return;
    this._shownNode = shown;
    const at = this.card.contains(document.activeElement) ? document.activeElement.id : "";
    const drop = twice("Drop", "Really drop?", { class: "danger", id: "node-drop", title: "Forget it and everything below it, in every tier" }, () => this._order("DELETE", ""));
    this.card.replaceChildren(
      h("h3", {}, node.parent === null ? "Root" : `Tokens ${count(node.start)} – ${count(node.end)}`),
      button("×", { class: "plain close", "aria-label": "Close" }, () => this.select(null)),
      node.words ? h("div", { class: "words" }, node.words) : "",
      h("dl", { class: "facts" }, facts(node).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      talk ? h("p", {}, button(`Open “${talk.title}”`, { class: "plain", id: "node-open" }, () => this.wanted(talk))) : "",
      h("div", { class: "row-end" }, button(node.pinned ? "Unpin" : "Pin", { id: "node-pin" }, () => this._pin()), drop));
    if (at) find(at)?.focus();
  }

  _pin() {
    const node = this.picture.places.get(this.selected)?.node;
    if (node) this._order("POST", node.pinned ? "/unpin" : "/pin");
  }

  async _order(method, action) {
    try {
      await json(`/cache/nodes/${this.selected}${action}?model=${encodeURIComponent(this.data.model)}`, { method });
      say(action ? "Done" : "Dropped");
    } catch (error) {
      this._shownNode = null;
      this.card.append(h("p", { class: "wrong", role: "alert" }, trouble(error)));
    }
    this.data.refresh();
  }
}

function summary(node) {
  const where = node.id < 0 ? "only on disk" : node.checkpoint?.tiers.map(tierPlace).join(", ") || "in no tier";
  const kept = node.checkpoint ? `checkpoint (${node.checkpoint.kind}) ${where}` : "no checkpoint";
  return `${count(node.end)} tokens · ${kept}${node.pinned ? " · pinned" : ""}`;
}

function facts(node) {
  const { checkpoint, kv } = node;
  const listed = [["length", `${count(node.end - node.start)} tokens`], ["KV", `${bytes(kv.bytes)} · ${kv.tiers.join(", ") || "nowhere"}`]];
  if (checkpoint) listed.push([`${checkpoint.kind} state`, `${bytes(checkpoint.bytes)} · ${checkpoint.tiers.join(", ")}`]);
  if (node.last_use !== null) listed.push(["came back to", `${count(node.hits)} times · used ${ago(node.last_use)}`]);
  return node.parent === null ? [["namespace", node.namespace], ["branches", count(node.n_children)]] : listed;
}
