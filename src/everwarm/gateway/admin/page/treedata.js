// The prefix tree of a model, page by page. Read again when it changes, but rarely enough to cost the server almost nothing.

import { json, pause } from "./api.js";
import { layout } from "./layout.js";
import { arrange } from "./trunk.js";

const PAGE = 1000;
const LEAST_MS = 1000; // between two readings, per page

export class TreeData {
  constructor(changed) {
    this.changed = changed; // (picture, trouble)
    this.model = null;
    this.nodes = [];
    this.picture = layout([]);
    this.around = null; // () => {talks, open, namespace}; null: every node is shown
    this._stop = null;
    this._isStale = false;
    this._readAt = 0;
    this._n_pages = 1;
  }

  choose(model) {
    if (this.model === model) return;
    this.model = model;
    this.nodes = [];
    this.picture = layout([]);
    this.stop();
  }

  stop() {
    this._stop?.abort();
    this._stop = null;
  }

  /** Reads the tree at once, or when the last reading is long enough ago. */
  async refresh() {
    this._isStale = true;
    if (this._stop || this.model === null) return;
    const stop = (this._stop = new AbortController());
    while (this._isStale && !stop.signal.aborted) {
      const wait_ms = this._readAt + LEAST_MS * this._n_pages - performance.now();
      if (wait_ms > 0) await pause(wait_ms);
      if (stop.signal.aborted) break;
      this._isStale = false;
      await this._read(stop.signal);
      this._readAt = performance.now();
    }
    if (this._stop === stop) this._stop = null;
  }

  async _read(signal) {
    const isFirst = this.picture.places.size === 0;
    try {
      const nodes = await this._pages(signal, (some) => { if (isFirst) this._show(some); });
      this._show(nodes);
    } catch (error) {
      if (error.name !== "AbortError") this.changed(this.picture, error);
    }
  }

  async _pages(signal, sofar) {
    for (let attempt = 0; attempt < 3; attempt += 1) {
      const nodes = [];
      let after = "";
      try {
        for (this._n_pages = 1; ; this._n_pages += 1) {
          const page = await json(`/cache/tree?model=${encodeURIComponent(this.model)}&limit=${PAGE}${after}`, { signal });
          nodes.push(...page.nodes);
          if (page.next === null) return nodes;
          sofar(nodes);
          after = `&after=${encodeURIComponent(page.next)}`;
        }
      } catch (error) {
        if (error.status !== 409) throw error; // 409: the tree changed meanwhile
      }
    }
    return [];
  }

  _show(nodes) {
    this.nodes = nodes;
    this.arrange();
  }

  /** Places the nodes that are known anew: around the open conversation, or all of them. */
  arrange() {
    const around = this.around?.();
    this.picture = around ? arrange(this.nodes, around.talks, around.open, around.namespace) : layout(this.nodes);
    this.changed(this.picture, null);
  }
}
