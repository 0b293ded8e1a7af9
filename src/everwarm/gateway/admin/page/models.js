// The list of models with their state, and buttons to load and unload them.

import { json, link } from "./api.js";
import { button, find, h, say } from "./dom.js";
import { bytes, count, trouble } from "./words.js";

const KEEP_LOOKING_MS = 400;

export class Models extends EventTarget {
  constructor(root, feed) {
    super();
    this.all = [];
    this.chosen = null;
    this.isShown = false;
    this._isLost = false;
    this.wrong = h("p", { class: "wrong", role: "alert" });
    this.list = h("ul", { class: "model-list" });
    this.feed = feed;
    this.limits = h("p", { class: "about", id: "models-limits", hidden: true }, "This key may use models; loading and unloading needs an admin key. ",
      button("Use another key", { id: "other-key" }, () => link.dispatchEvent(new Event("locked"))));
    this.select = find("model");
    this._again = 0;
    root.append(h("div", { class: "page-inner" }, h("h2", {}, "Models"), this.limits, this.wrong, this.list));
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
      this._took((await json("/v1/models")).data);
    } catch (error) {
      if (error.status !== 0) this.wrong.textContent = trouble(error);
    }
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
    return h("li", { class: "card model", "data-status": state, "data-model": model.id },
      h("div", {}, h("div", { class: "name" }, model.id, h("span", { class: "state" }, this._isLost ? `last seen ${state}` : state === "loading" ? `loading ${Math.round(100 * (progress ?? 0))} %` : state)), h("div", { class: "about" }, about(model))),
      act, bar, failed ? h("p", { class: "wrong" }, reason ?? "could not be loaded") : null);
  }

  async _order(order, model) {
    this.wrong.textContent = "";
    this._expectingUntil = performance.now() + 3000;
    try {
      await json(`/models/${order}`, { method: "POST", body: { model } });
      say(`${order} ${model}`);
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

function about(model) {
  const facts = [];
  if (model.meta) facts.push(`${(model.meta.n_params / 1e6).toFixed(1)} M parameters`, bytes(model.meta.size));
  if (model.max_input_tokens) facts.push(`${count(model.max_input_tokens)} tokens of context`);
  if (model.n_running || model.n_waiting) facts.push(`${model.n_running} running, ${model.n_waiting} waiting`);
  return facts.join(" · ") || "asleep: loaded on demand";
}
