// System prompt, temperature and length of the chat's replies.

import { h } from "./dom.js";

export function setupPanel(setup, changed) {
  const what = h("span", { class: "what" });
  const show = () => {
    what.textContent = setup.system.trim() || "No system prompt";
    figures.textContent = `temperature ${setup.temperature} · at most ${setup.max_tokens} tokens`;
  };
  const figures = h("span", { class: "number" });
  const set = (name, value) => { setup[name] = value; show(); changed(); };
  const number = (name, label, least, most, step) => h("label", {}, label, h("input", {
    type: "number", id: `setup-${name}`, min: least, max: most, step, value: setup[name],
    on: { change: (event) => {
      const given = Number(event.target.value);
      const kept = Number.isFinite(given) ? Math.min(most, Math.max(least, given)) : setup[name];
      event.target.value = kept;
      set(name, kept);
    } },
  }));
  const system = h("textarea", { id: "setup-system", rows: "3", value: setup.system, placeholder: "You are …", on: { input: (event) => set("system", event.target.value) } });
  const words = h("input", { type: "checkbox", on: { change: (event) => set("words", event.target.checked) } });
  words.checked = setup.words;
  show();
  return h("details", { class: "setup" }, h("summary", {}, what, figures),
    h("div", { class: "fields" }, h("label", { class: "system" }, "System prompt", system),
      number("temperature", "Temperature", 0, 5, 0.1), number("max_tokens", "Most tokens", 1, 100_000, 1),
      h("label", { class: "tick" }, words, "Show the words where a prompt left what was known")));
}
