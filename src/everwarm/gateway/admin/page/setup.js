// The chat's settings: system prompt, length, sampling, stop strings and tools. What is left empty is not sent.

import { h } from "./dom.js";

// name, label, least, most, step
const SAMPLING = [
  ["top_p", "Top p", 0, 1, 0.01], ["top_k", "Top k", 0, 1000, 1], ["min_p", "Min p", 0, 1, 0.01], ["repeat_penalty", "Repeat penalty", 0.1, 10, 0.05],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1], ["frequency_penalty", "Frequency penalty", -2, 2, 0.1], ["seed", "Seed", 0, 4_294_967_295, 1],
];
const MOST_STOPS = 16;

/** The fields of a request that the settings say. */
export function sampled(setup) {
  const stops = setup.stop.split("\n").filter(Boolean).slice(0, MOST_STOPS);
  const { tools } = readTools(setup.tools);
  return { temperature: setup.temperature, max_tokens: setup.max_tokens, ...setup.sampling, ...(stops.length ? { stop: stops } : {}), ...(tools.length ? { tools } : {}) };
}

/** Tools as OpenAI's API has them, or as functions alone; `wrong` says why they cannot be used. */
function readTools(text) {
  if (!text.trim()) return { tools: [], wrong: "" };
  let found;
  try { found = JSON.parse(text); } catch (error) { return { tools: [], wrong: `Not JSON: ${error.message}` }; }
  const all = (Array.isArray(found) ? found : [found]).map((each) => (each?.function ? each : { type: "function", function: each }));
  const bad = all.findIndex((each) => typeof each.function?.name !== "string");
  return bad < 0 ? { tools: all, wrong: "" } : { tools: [], wrong: `Tool ${bad + 1} has no name.` };
}

export function setupPanel(setup, changed) {
  const what = h("span", { class: "what" });
  const figures = h("span", { class: "number" });
  const show = () => {
    what.textContent = setup.system.trim() || "No system prompt";
    const n_more = Object.keys(setup.sampling).length + (setup.stop ? 1 : 0) + readTools(setup.tools).tools.length;
    figures.textContent = `temperature ${setup.temperature} · at most ${setup.max_tokens} tokens${n_more ? ` · ${n_more} more` : ""}`;
  };
  const set = (to, name, value) => {
    if (value === undefined) delete to[name];
    else to[name] = value;
    show();
    changed();
  };
  const number = (to, [name, label, least, most, step], usual) => h("label", {}, label, h("input", {
    type: "number", id: `setup-${name}`, min: least, max: most, step, value: to[name] ?? "", placeholder: usual === undefined ? "default" : null,
    on: { change: (event) => {
      const given = event.target.value === "" ? NaN : Number(event.target.value);
      const kept = Number.isFinite(given) ? Math.min(most, Math.max(least, given)) : usual === undefined ? undefined : to[name];
      event.target.value = kept ?? "";
      set(to, name, kept);
    } },
  }));
  const wrong = h("span", { class: "wrong", id: "tools-wrong", role: "alert" });
  const area = (name, label, hint, rows, more) => h("label", { class: "wide" }, label, h("textarea", { id: `setup-${name}`, rows, value: setup[name], placeholder: hint, on: { input: (event) => {
    set(setup, name, event.target.value);
    wrong.textContent = readTools(setup.tools).wrong;
  } } }), more);
  const words = h("input", { type: "checkbox", on: { change: (event) => set(setup, "words", event.target.checked) } });
  words.checked = setup.words;
  wrong.textContent = readTools(setup.tools).wrong;
  show();
  return h("details", { class: "setup" }, h("summary", { title: "Settings of this chat" }, what, figures),
    h("div", { class: "fields" }, area("system", "System prompt", "You are …", "3"),
      number(setup, ["temperature", "Temperature", 0, 5, 0.1], 0.7), number(setup, ["max_tokens", "Most tokens", 1, 100_000, 1], 1024),
      SAMPLING.map((each) => number(setup.sampling, each)),
      area("stop", "Stop strings, one per line", "", "1"), area("tools", "Tools (JSON)", '[{"name": "look", "parameters": {}}]', "1", wrong),
      h("label", { class: "tick" }, words, "Show the words where a prompt left what was known")));
}
