// The live view: figures, charts, tiers beside their budgets, slots and queue, and the last requests.

import { drawBars, drawLines, percentile, rolling } from "./charts.js";
import { h } from "./dom.js";
import { Requests } from "./requests.js";
import { bytes, count, duration, short, tierName } from "./words.js";

const DRAW_MS = 250; // between two pictures
const STATES = { starting: "starting", ready: "ready", restarting: "starting again", unhealthy: "down", stopped: "asleep" };

export class Live {
  constructor(root, feed) {
    this.feed = feed;
    this.isShown = false;
    this._frame = 0;
    this.tiles = Object.fromEntries(["hit", "reused", "saved", "first", "engine"].map((name) => [name, tile()]));
    this.bars = h("canvas", { class: "chart", role: "img", "aria-label": "Prompt tokens by request", id: "chart-tokens" });
    this.lines = h("canvas", { class: "chart", role: "img", "aria-label": "Time to first token", id: "chart-first" });
    this.tiers = h("div", { id: "tiers" });
    this.slots = h("div", { id: "slots" });
    this.requests = new Requests(feed);
    this._build(root);
    for (const event of ["stats", "engine", "request", "requests"]) feed.addEventListener(event, () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(this.bars);
  }

  _build(root) {
    const { tiles } = this;
    const keys = [h("span", { class: "chip was" }, "reused"), h("span", { class: "chip now" }, "read anew")];
    const percentiles = [h("span", { class: "chip half" }, "p50"), h("span", { class: "chip" }, "p95")];
    root.append(h("div", { class: "page-inner" },
      h("div", { class: "tiles" }, Object.values(tiles).map((each) => each.element)),
      h("div", { class: "pair" },
        h("div", { class: "card" }, h("h3", {}, "Prompt tokens by request", h("span", { class: "chips" }, keys)), this.bars),
        h("div", { class: "card" }, h("h3", {}, "Time to first token, recent", h("span", { class: "chips" }, percentiles)), this.lines)),
      h("div", { class: "pair" },
        h("div", { class: "card" }, h("h3", {}, "Tiers"), this.tiers),
        h("div", { class: "card" }, h("h3", {}, "Slots and queue"), this.slots)),
      h("div", { class: "card" }, h("h3", {}, "Requests"), this.requests.element)));
  }

  show(isShown) {
    this.isShown = isShown;
    this.redraw();
  }

  redraw() {
    if (!this._frame && this.isShown) this._frame = setTimeout(() => { this._frame = 0; this._draw(); }, DRAW_MS);
  }

  _draw() {
    if (!this.isShown || document.hidden) return;
    const { overview } = this.feed;
    const ended = [...this.feed.requests.values()].filter((row) => row.status === "done");
    const firsts = ended.map((row) => row.ttft_ms).filter((ms) => ms !== null);
    this._drawCharts(ended, firsts);
    this.requests.show();
    if (overview) this._figures(overview, firsts);
  }

  _drawCharts(ended, firsts) {
    drawBars(this.bars, ended);
    const [half, most] = [rolling(firsts.slice(-120), 0.5), rolling(firsts.slice(-120), 0.95)];
    drawLines(this.lines, [{ values: most, colour: "muted" }, { values: half, colour: "ink" }]);
    const sum = (name) => ended.reduce((total, row) => total + row[name], 0);
    this.bars.setAttribute("aria-label", `${count(ended.length)} requests: ${count(sum("n_cached"))} tokens reused, ${count(sum("n_read"))} read anew`);
    this.lines.setAttribute("aria-label", `Time to first token: half within ${duration(percentile(firsts, 0.5))}, 95 percent within ${duration(percentile(firsts, 0.95))}`);
  }

  _figures(overview, firsts) {
    const { tokens, engine, tiers } = overview;
    const { tiles } = this;
    tiles.hit.set(`${(100 * overview.hit_rate).toFixed(1)} %`, "of prompt tokens reused");
    tiles.reused.set(short(tokens.reused), `tokens reused · ${short(tokens.read)} read`);
    tiles.saved.set(duration(1000 * overview.seconds_saved), "of reading saved");
    tiles.first.set(firsts.length ? duration(percentile(firsts, 0.5)) : "–", firsts.length ? `to first token · p95 ${duration(percentile(firsts, 0.95))}` : "to first token");
    tiles.engine.set(STATES[engine.state] ?? engine.state, `${count(overview.requests.total)} requests · restarted ${count(engine.restarts)}×`);
    this.tiers.replaceChildren(...tierMeters(tiers, engine));
    this.slots.replaceChildren(...slotPicture(engine));
  }
}

function tile() {
  const figure = h("div", { class: "figure number" }, "–");
  const under = h("div", { class: "under" });
  const set = (words, more) => { figure.textContent = words; under.textContent = more; };
  return { element: h("div", { class: "card tile" }, figure, under), set };
}

function tierMeters(tiers, engine) {
  if (!tiers) return [h("p", { class: "muted" }, "The engine does not run.")];
  const { device, ram, disk } = tiers;
  const cells = `${count(engine.n_cells_used ?? device.n_cells)} of ${count(engine.n_ctx ?? 0)} cells`;
  const made = [
    meter("device", `${count(device.n_states)} parked`, cells, device.n_cells / (engine.n_ctx || 1)),
    meter("ram", `${count(ram.n_states)} states, ${count(ram.n_segments)} segments`, `${bytes(ram.bytes)} of ${bytes(ram.budget_bytes)}`, ram.bytes / ram.budget_bytes),
  ];
  if (disk) made.push(meter("disk", `${count(disk.n_objects)} objects${disk.degraded ? ` · degraded: ${disk.reason}` : ""}`, `${bytes(disk.bytes)} of ${bytes(disk.budget_bytes)}`, disk.bytes / (disk.budget_bytes || 1)));
  return made;
}

function meter(tier, what, how_much, share) {
  const percent = (100 * Math.min(1, Math.max(0, share || 0))).toFixed(2);
  return h("div", { class: "meter" },
    h("div", { class: "line" }, h("span", {}, h("b", {}, tierName(tier)), h("span", { class: "muted" }, ` · ${what}`)), h("span", { class: "muted number" }, how_much)),
    h("div", { class: `bar ${tier}`, role: "meter", "aria-label": tierName(tier), "aria-valuenow": percent, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuetext": how_much }, h("i", { style: { width: `${percent}%` } })));
}

function slotPicture(engine) {
  const n_slots = Math.min(64, engine.n_slots ?? 0);
  const slots = Array.from({ length: n_slots }, (_, nth) => h("i", { class: nth < engine.n_running ? "busy" : null }));
  const words = `${count(engine.n_running ?? 0)} of ${count(n_slots)} slots busy · ${count(engine.n_queued ?? 0)} waiting`;
  return [h("div", { class: "slots", role: "img", "aria-label": words }, slots), h("p", { class: "muted small" }, words)];
}
