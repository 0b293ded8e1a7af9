// Puts the views together: which one is shown, for which model, in which colours, with which key.

import { json, link, setKey } from "./api.js";
import { chatView } from "./chat.js";
import { find } from "./dom.js";
import { Feed } from "./feed.js";
import { Headline } from "./headline.js";
import { load, store } from "./keep.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { Tree } from "./tree.js";

const VIEWS = ["chat", "tree", "live", "models"];
const WIDE = matchMedia("(min-width: 1120px)");
const STATES = { starting: "engine starting", restarting: "engine restarting", unhealthy: "engine down", stopped: "asleep", loading: "loading", unloaded: "asleep", gone: "not reachable" };

const feed = new Feed();
const chat = chatView(feed);
const headline = new Headline(find("promise"), feed);
const tree = new Tree(find("view-tree"), feed);
const live = new Live(find("view-live"), feed);
const models = new Models(find("view-models"), feed);
let view = "chat";
let isLost = false;

// which view

function go() {
  setMenu(false);
  const wanted = location.hash.slice(1);
  view = VIEWS.includes(wanted) ? wanted : "chat";
  document.body.dataset.view = view;
  for (const each of document.querySelectorAll("[data-go]")) {
    if (each.dataset.go === view) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  settle();
}

function settle() {
  const isBeside = "beside" in document.body.dataset && WIDE.matches && view === "chat";
  tree.show(view === "tree" || isBeside);
  live.show(view === "live");
  models.show(view === "models");
}

function setBeside(isBeside) {
  if (isBeside) document.body.dataset.beside = "";
  else delete document.body.dataset.beside;
  find("beside").setAttribute("aria-pressed", String(isBeside));
  store("everwarm.beside", isBeside);
  settle();
}

// which model

let checkedModel = ""; // the model whose vision support is known; one that is not loaded is not checked, because that would load it
let sees = false;

async function modelChanged() {
  const model = models.current();
  feed.choose(model?.id ?? null);
  if (tree.data.model !== (model?.id ?? null)) tree.choose(model?.id ?? null);
  showEngine();
  if (!model || model.status.value !== "loaded" || checkedModel === model.id) return chat.setModel(model?.id ?? null, checkedModel === model?.id && sees, model?.max_input_tokens ?? 0);
  checkedModel = model.id;
  sees = false;
  chat.setModel(model.id, false, model.max_input_tokens);
  const props = await json(`/props?model=${encodeURIComponent(model.id)}`).catch(() => null);
  sees = props?.modalities?.vision === true;
  chat.setModel(models.chosen, sees, models.current()?.max_input_tokens ?? 0);
}

function showEngine() {
  const engine = feed.isOpen ? feed.overview?.engine : null;
  const model = models.current();
  let state = engine?.state ?? { loaded: "ready" }[model?.status.value] ?? model?.status.value ?? "unknown";
  if (model?.status.failed) state = "unhealthy";
  if (state === "ready" && engine?.n_running > 0) state = "busy";
  if (isLost) state = "gone";
  find("engine").dataset.state = state;
  find("engine-words").textContent = state === "busy" ? `${engine.n_running} running` : STATES[state] ?? state;
  showBanner(engine, model);
}

/** Everything the page shows of a server that is gone is old: it says so. */
function setLost(isNowLost) {
  isLost = isNowLost;
  document.body.toggleAttribute("data-stale", isLost);
  headline.isLost = isLost;
  models.isLost = isLost;
  showEngine();
}

function setMenu(isOpen) {
  document.body.toggleAttribute("data-menu", isOpen);
  find("menu").setAttribute("aria-expanded", String(isOpen));
}

function showBanner(engine, model) {
  const banner = find("banner");
  let text = "";
  let kind = "wait";
  if (isLost) [text, kind] = ["The server cannot be reached. Trying again …", "bad"];
  else if (engine?.state === "restarting" || engine?.state === "starting") text = "The engine is being started again. What was read is still known.";
  else if (engine?.state === "unhealthy") {
    const next = engine.retry_at ? ` It is tried again at ${new Date(1000 * engine.retry_at).toLocaleTimeString()}.` : "";
    [text, kind] = [`The engine is down: ${engine.reason ?? "the server's log says why"}.${next}`, "bad"];
  }
  else if (model?.status.failed) [text, kind] = [`${model.id} could not be loaded: ${model.status.reason ?? "no reason given"}`, "bad"];
  if (banner.textContent !== text) banner.textContent = text;
  banner.dataset.kind = kind;
  banner.hidden = !text;
}

// keys, colours, shortcuts

function locked() {
  const dialog = find("key-dialog");
  if (dialog.open) find("key-error").textContent = "That key is not the right one.";
  else dialog.showModal();
}

async function opened(event) {
  event.preventDefault();
  setKey(find("key").value);
  find("key-error").textContent = "";
  const isRight = await json("/v1/models").then(() => true, () => false);
  if (!isRight) return;
  find("key").value = "";
  find("key-dialog").close();
  await models.refresh();
  feed.again();
  settle();
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  store("everwarm.theme", theme);
  tree.recolour();
  live.redraw();
}

function toggleTheme() {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(isDark ? "light" : "dark");
}

const SHORTCUTS = {
  1: () => { location.hash = "chat"; }, 2: () => { location.hash = "tree"; }, 3: () => { location.hash = "live"; }, 4: () => { location.hash = "models"; },
  n: () => { location.hash = "chat"; chat.fresh(); }, "/": () => { location.hash = "chat"; chat.composer.focus(); },
  r: () => view === "chat" && chat.regenerate(), b: () => setBeside(!("beside" in document.body.dataset)),
  t: toggleTheme, "?": () => find("help-dialog").showModal(),
};

function pressed(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return chat.stop();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  const shortcut = SHORTCUTS[event.key];
  if (!shortcut) return;
  event.preventDefault();
  shortcut();
}

// together

window.addEventListener("hashchange", go);
WIDE.addEventListener("change", settle);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
document.addEventListener("keydown", pressed);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { models.refresh(); settle(); } });
models.addEventListener("change", modelChanged);
for (const event of ["stats", "engine"]) feed.addEventListener(event, showEngine);
link.addEventListener("locked", locked);
link.addEventListener("lost", () => setLost(true));
link.addEventListener("found", () => { setLost(false); models.refresh(); });
find("theme").addEventListener("click", toggleTheme);
find("beside").addEventListener("click", () => setBeside(!("beside" in document.body.dataset)));
tree.follow(() => ({ talks: chat.talks, open: chat.talk }));
tree.wanted = (talk) => { location.hash = "chat"; chat.open(talk); };
tree.pointed = (ids) => chat.mark(ids);
chat.addEventListener("point", ({ detail }) => tree.point(detail));
chat.addEventListener("change", () => tree.rearrange());
feed.addEventListener("kept", () => chat.setKept(headline.n_kept));
find("menu").addEventListener("click", () => setMenu(!("menu" in document.body.dataset)));
chat.addEventListener("open", () => setMenu(false));
find("help").addEventListener("click", () => find("help-dialog").showModal());
find("help-close").addEventListener("click", () => find("help-dialog").close());
find("key-form").addEventListener("submit", opened);

setTheme(load("everwarm.theme", undefined));
setBeside(load("everwarm.beside", true));
go();
models.refresh();
chat.composer.focus();

window.everwarm = { tree, chat, feed }; // for the browser's console
