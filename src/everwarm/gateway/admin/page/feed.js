// The stream of server events. Open while the tab is visible.

import { ask, events, json, link, pause } from "./api.js";

export class Feed extends EventTarget {
  constructor() {
    super();
    this.model = null;
    this.overview = null;
    this.overviewAt = null; // when it came, by this machine's clock
    this.role = ""; // the role of this page's key; empty: not known yet
    this.requests = new Map(); // by id, in order of their start
    this._stop = null;
    this._wait = 500;
    document.addEventListener("visibilitychange", () => this._settle());
    link.addEventListener("found", () => { this._wait = 500; this._settle(); });
  }

  choose(model) {
    if (this.model === model) return;
    this.model = model;
    this.overview = null;
    this._close();
    this._settle();
  }

  /** Reconnects with another key, which may see other things. */
  again() {
    this.role = "";
    this.overview = null;
    this._close();
    this._settle();
  }

  /** Reads the figures now: after a reply nobody wants to wait for the next event. */
  async refresh() {
    const { model } = this;
    const overview = await json(`/cache?model=${encodeURIComponent(model)}`).catch(() => null);
    if (!overview || model !== this.model) return;
    this._took(overview);
    this._notify("stats", overview);
  }

  _took(overview) {
    this.overview = overview;
    this.overviewAt = Date.now();
  }

  get isOpen() {
    return this._stop !== null;
  }

  _settle() {
    const isDue = !document.hidden && this.model !== null;
    if (isDue && this._stop === null) this._run();
    if (!isDue) this._close();
  }

  _close() {
    this._stop?.abort();
    this._stop = null;
  }

  async _run() {
    const stop = (this._stop = new AbortController());
    try {
      await this._listRequests(stop.signal);
      const answer = await ask(`/cache/events?model=${encodeURIComponent(this.model)}`, { signal: stop.signal });
      for await (const { event, data } of events(answer)) {
        this._wait = 500;
        if (event) this._receive(event, data);
      }
    } catch (error) {
      if (error.name === "AbortError" || error.status === 401) return this._ended(stop);
    }
    await pause(this._wait);
    this._wait = Math.min(8000, this._wait * 2);
    this._ended(stop);
    this._settle();
  }

  _ended(stop) {
    if (this._stop === stop) this._stop = null;
  }

  async _listRequests(signal) {
    const { requests } = await (await ask("/cache/requests?limit=200", { signal })).json();
    this.requests = new Map(requests.reverse().map((row) => [row.id, row]));
    this._notify("requests", null);
  }

  _receive(event, data) {
    if (event === "hello" || event === "stats") this._took(data);
    if (event === "hello") this.role = data.caller?.role ?? "";
    if (event === "tree" && this.overview) this.overview.version = data.version;
    if (event === "engine" && this.overview) Object.assign(this.overview.engine, data);
    if (event === "request") this._keep(data);
    this._notify(event === "hello" ? "stats" : event, data);
  }

  _keep(row) {
    this.requests.set(row.id, row);
    if (this.requests.size > 512) this.requests.delete(this.requests.keys().next().value);
  }

  _notify(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
