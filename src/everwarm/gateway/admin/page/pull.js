// The form that downloads a model from the Hub, with its progress. The models view shows it where the server allows that.

import { ask, lines } from "./api.js";
import { button, h, say } from "./dom.js";
import { bytes, trouble } from "./words.js";

export class PullForm extends EventTarget {
  constructor() {
    super();
    this._stop = null; // of the download that is running
    this.name = h("input", { id: "pull-name", type: "text", placeholder: "owner/repo:QUANT", autocomplete: "off", spellcheck: "false", required: true });
    this.go = h("button", { type: "submit", id: "pull" }, "Download");
    this.end = button("Stop", { id: "pull-stop", hidden: true }, () => this._stop?.abort());
    this.fill = h("i", {});
    this.bar = h("div", { class: "bar", role: "progressbar", "aria-label": "download", "aria-valuenow": 0, hidden: true }, this.fill);
    this.said = h("p", { class: "about", id: "pull-said", role: "status" });
    this.root = h("form", { class: "card pull", hidden: true, on: { submit: (event) => { event.preventDefault(); this._pull(this.name.value.trim()); } } },
      h("label", { for: "pull-name" }, "Download a model from the Hugging Face Hub"), h("div", { class: "pull-line" }, this.name, this.go, this.end), this.bar, this.said);
  }

  async _pull(model) {
    this._stop = new AbortController();
    this._running(true);
    this._progress(0, 0);
    this.said.textContent = `Looking for ${model} …`;
    try {
      const answer = await ask("/api/pull", { method: "POST", body: { model }, signal: this._stop.signal });
      for await (const { error, total, completed } of lines(answer)) {
        if (error) throw new Error(error);
        if (total) this._progress(completed, total, model);
      }
      this.said.textContent = `${model} is here.`;
      say(`${model} is here`);
      this.name.value = "";
    } catch (error) {
      this.said.textContent = error.name === "AbortError" ? `Stopped. The next download of ${model} continues where this one ended.` : trouble(error);
    }
    this._running(false);
    this.dispatchEvent(new Event("change"));
  }

  _running(isRunning) {
    this.go.disabled = this.name.disabled = isRunning;
    this.end.hidden = this.bar.hidden = !isRunning;
  }

  _progress(completed, total, model) {
    const share = total ? completed / total : 0;
    this.fill.style.setProperty("width", `${100 * share}%`);
    this.bar.setAttribute("aria-valuenow", Math.round(100 * share));
    if (total) this.said.textContent = `${model}: ${bytes(completed)} of ${bytes(total)}`;
  }
}
