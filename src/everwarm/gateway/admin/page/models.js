// The models as cards: what they are, what is warm of them, and buttons to load, unload and delete them.

import { ask, json, link } from "./api.js";
import { button, find, h, say, twice } from "./dom.js";
import { countEnds, layout } from "./layout.js";
import { PullForm } from "./pull.js";
import { bytes, count, tierPlace, trouble } from "./words.js";

const KEEP_LOOKING_MS = 400;

export class Models extends EventTarget {
  constructor(root, feed) {
    super();
    this.all = [];
    this.chosen = null;
    this.isShown = false;
    this._isLost = false;
    this._files = new Map(); // by id, what the headers of files say: size and details
    this._kept = new Map(); // by id of a loaded model, how many conversations are warm, and their bytes by tier
    this.wrong = h("p", { class: "wrong", role: "alert" });
    this.list = h("ul", { class: "model-list" });
    this.feed = feed;
    this.limits = h("p", { class: "about", id: "models-limits", hidden: true }, "This key may use models; loading and unloading needs an admin key. ",
      button("Use another key", { id: "other-key" }, () => link.dispatchEvent(new Event("locked"))));
    this.pull = new PullForm();
    this.pull.addEventListener("change", () => this.refresh());
    this.select = find("model");
    this._again = 0;
    root.append(h("div", { class: "page-inner" }, h("h2", {}, "Models"), this.limits, this.wrong, this.pull.root, this.list));
    this.select.addEventListener("change", () => this.choose(this.select.value));
    feed.addEventListener("model", () => this.refresh());
    feed.addEventListener("stats", () => { if (feed.role !== this._role) { this._role = feed.role; this._show(); } });
    feed.addEventListener("engine", ({ detail }) => { if (detail.state !== this._state) this.refresh(); this._state = detail.state; });
  }

  show(isShown) {
    this.isShown = isShown;
    if (isShown) this.refresh();
  }

  async refresh() {
    try {
      const { data, can_pull } = await json("/v1/models");
      this.pull.root.hidden = !can_pull;
      this._took(data);
      if (this.isShown) await this._look();
    } catch (error) {
      if (error.status !== 0) this.wrong.textContent = trouble(error);
    }
  }

  /** Reads what only this view shows. */
  async _look() {
    const { models } = await json("/api/tags");
    this._files = new Map(models.map((each) => [each.name.replace(/:latest$/, ""), each]));
    for (const { id, status } of this.all) {
      if (status.value === "loaded") this._kept.set(id, await warmOf(id).catch(() => null));
      else this._kept.delete(id);
    }
    this._show();
  }

  _took(models) {
    this.all = models;
    if (!models.some((each) => each.id === this.chosen)) this.chosen = usual(models)?.id ?? null;
    this._show();
    this.dispatchEvent(new Event("change"));
    const isMoving = models.some((each) => each.status.value === "loading" || each.n_waiting);
    clearTimeout(this._again);
    if ((isMoving || this._isExpecting()) && !document.hidden) this._again = setTimeout(() => this.refresh(), KEEP_LOOKING_MS);
  }

  /** For a few seconds after an order, until its effect is visible. */
  _isExpecting() {
    return performance.now() < (this._expectingUntil ?? 0);
  }

  /** While the server is gone nothing can be ordered, and states are what was last seen. */
  set isLost(isLost) {
    this._isLost = isLost;
    this._show();
  }

  choose(model) {
    this.chosen = model;
    this._show();
    this.dispatchEvent(new Event("change"));
  }

  current() {
    return this.all.find((each) => each.id === this.chosen) ?? null;
  }

  _show() {
    const options = this.all.map((each) => h("option", { value: each.id }, each.id));
    this.select.replaceChildren(...options);
    this.select.value = this.chosen ?? "";
    this.select.disabled = this.all.length < 2;
    this.limits.hidden = this.feed.role !== "user";
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.list.replaceChildren(...this.all.map((model) => this._card(model)));
    if (focused) [...this.list.querySelectorAll("button")].find((each) => each.dataset.key === focused)?.focus();
  }

  _card(model) {
    const { value, progress, failed, reason } = model.status;
    const state = failed ? "failed" : value;
    const order = value === "unloaded" ? "load" : "unload";
    const act = button(order === "load" ? "Load" : "Unload", { disabled: value === "loading" || this.feed.role === "user" || this._isLost, "data-key": `${order} ${model.id}` }, () => this._order(order, model.id));
    const bar = value === "loading" ? h("div", { class: "bar", role: "progressbar", "aria-label": `loading ${model.id}`, "aria-valuenow": Math.round(100 * (progress ?? 0)) },
      h("i", { style: { width: `${100 * (progress ?? 0)}%` } })) : null;
    const facts = about(model, this._files.get(model.id), this._kept.get(model.id));
    const gone = this.pull.root.hidden ? null : twice("Delete", "Delete its files?", { class: "plain", disabled: this._isLost, "data-key": `delete ${model.id}` }, () => this._delete(model.id));
    return h("li", { class: "card model", "data-status": state, "data-model": model.id },
      h("div", {}, h("h3", { class: "name" }, model.id, h("span", { class: "state" }, this._isLost ? `last seen ${state}` : state === "loading" ? `loading ${Math.round(100 * (progress ?? 0))} %` : state))),
      h("div", { class: "orders" }, gone, act), bar, h("dl", { class: "facts about" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: "number" }, value)))), failed ? h("p", { class: "wrong" }, reason ?? "could not be loaded") : null);
  }

  _order(order, model) {
    return this._tell(`${order} ${model}`, () => json(`/models/${order}`, { method: "POST", body: { model } }));
  }

  _delete(model) {
    return this._tell(`${model} is deleted`, () => ask("/api/delete", { method: "DELETE", body: { model } }));
  }

  async _tell(said, send) {
    this.wrong.textContent = "";
    this._expectingUntil = performance.now() + 3000;
    try {
      await send();
      say(said);
    } catch (error) {
      this.wrong.textContent = trouble(error);
    }
    this.refresh();
  }
}

/** The default model: a loaded one, or else one that has not failed. */
function usual(models) {
  return models.find((each) => each.status.value === "loaded") ?? models.find((each) => !each.status.failed) ?? models[0];
}

/** What is known of a model, as names and values. */
function about(model, file, kept) {
  const details = file?.details ?? {};
  const facts = [
    ["family", details.family], ["parameters", details.parameter_size], ["quantisation", details.quantization_level === "unknown" ? "" : details.quantization_level],
    ["size", file?.size || model.meta?.size ? bytes(file?.size || model.meta.size) : ""], ["context", context(model)],
  ];
  if (kept) facts.push(["warm", warm(kept)]);
  if (model.n_running || model.n_waiting) facts.push(["requests", `${count(model.n_running)} running, ${count(model.n_waiting)} waiting`]);
  return facts.filter(([, value]) => value);
}

function context(model) {
  if (!model.max_input_tokens) return "";
  const trained = model.meta?.n_ctx_train;
  return `${count(model.max_input_tokens)}${trained ? ` of ${count(trained)}` : ""} tokens`;
}

function warm({ n, isMore, tiers }) {
  const where = Object.entries(tiers ?? {}).filter(([, tier]) => tier?.bytes).map(([name, tier]) => `${bytes(tier.bytes)} ${tierPlace(name)}`);
  return [`${count(n)}${isMore ? " or more" : ""} ${n === 1 ? "conversation" : "conversations"}`, ...where].join(" · ");
}

/** What is warm of a loaded model. */
async function warmOf(id) {
  const model = encodeURIComponent(id);
  const [overview, page] = [await json(`/cache?model=${model}`), await json(`/cache/tree?model=${model}&limit=1000`)];
  return { n: countEnds(layout(page.nodes).places.values()), isMore: page.next !== null, tiers: overview.tiers };
}
