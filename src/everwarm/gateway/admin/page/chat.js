// The chat view: conversations, messages with branches, the composer. What a reply costs is part of it.

import { button, find, h, say } from "./dom.js";
import { Composer } from "./composer.js";
import { exported, imported, loadSetup, loadTalks, storeSetup, storeTalks } from "./keep.js";
import { messageElement, refresh, resultsForm } from "./message.js";
import { fetchRendered } from "./render.js";
import { reply } from "./reply.js";
import { ROOT, add, choose, found, lastOf, newTalk, path, titleOf, toSend } from "./talk.js";
import { sampled, setupPanel } from "./setup.js";
import { OTHER_QUESTION, QUESTION, STEPS, longText } from "./tour.js";
import { bytes, count, stillWarm } from "./words.js";

const MOST_IMPORTED = 32 << 20; // bytes of a file

export class Chat extends EventTarget {
  constructor(root, feed) {
    super();
    this.feed = feed;
    this.n_kept = 0; // conversations that an earlier server left
    this.n_ctx = 0; // of the model; 0: not known
    this.talks = loadTalks();
    this.talk = this.talks[0] ?? newTalk();
    this.setup = loadSetup();
    this.model = null;
    this.extra = {}; // more fields of requests, for the browser's console
    this.writing = null; // {stop, message}
    this._frame = 0;
    this.list = h("ul", { class: "talk-list" });
    this.search = h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search conversations", on: { input: () => this.showList() } });
    this.undo = h("div", { class: "undo", role: "status", hidden: true });
    this.wrong = h("p", { class: "wrong note", role: "alert" });
    this.file = h("input", { type: "file", accept: "application/json,.json", hidden: true, id: "import-file", on: { change: () => this.importFile(this.file.files[0]) } });
    this.inner = h("div", { class: "inner" });
    this.messages = h("div", { class: "messages", role: "log", "aria-label": "Messages", "aria-live": "off", tabindex: "0" }, this.inner);
    this.composer = new Composer({ send: (text, pictures) => this.send(text, pictures), stop: () => this.stop() });
    this.panel = setupPanel(this.setup, () => storeSetup(this.setup));
    for (const [event, isOver] of [["pointerover", true], ["pointerleave", false]]) {
      this.inner.addEventListener(event, ({ target }) => this.dispatchEvent(new CustomEvent("point", { detail: isOver ? target.closest(".message")?.dataset.id ?? null : null })));
    }
    root.append(
      h("aside", { class: "talks", "aria-label": "Conversations" },
        button("+ New", { class: "new", title: "New conversation (n)", id: "new-talk" }, () => this.fresh()), this.search, this.list, this.undo, this.wrong,
        h("div", { class: "files" }, button("Export", { class: "plain", id: "export", title: "All conversations as a file" }, () => this.exportFile()),
          button("Import", { class: "plain", id: "import", title: "Conversations from a file" }, () => this.file.click()), this.file),
        h("p", { class: "note" }, "Kept in this browser only.")),
      this.room = h("div", { class: "room" }, this.messages, this.panel, this.composer.element));
    this.composer.takeDrops(this.room);
    this.show();
  }

  // conversations

  fresh() {
    if (this.writing) this.stop();
    this.open(newTalk());
    this.composer.focus();
  }

  open(talk) {
    if (this.writing) this.stop();
    this.talk = talk;
    this.show();
    this.dispatchEvent(new Event("open"));
  }

  /** Forgets a conversation; the last one can be brought back. */
  forget(talk) {
    const nth = this.talks.indexOf(talk);
    this.talks = this.talks.filter((each) => each !== talk);
    storeTalks(this.talks);
    const back = () => {
      this.talks.splice(Math.max(0, nth), 0, talk);
      storeTalks(this.talks);
      this.undo.hidden = true;
      this.open(talk);
    };
    this.undo.replaceChildren(h("span", {}, `Forgotten: ${talk.title}`), button("Undo", { class: "plain", id: "undo" }, back));
    this.undo.hidden = nth < 0;
    if (talk === this.talk) this.open(this.talks[0] ?? newTalk());
    else this.showList();
  }

  exportFile() {
    const url = URL.createObjectURL(new Blob([exported(this.talks)], { type: "application/json" }));
    h("a", { href: url, download: `everwarm-conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
    URL.revokeObjectURL(url);
  }

  /** Adds the conversations of a file; of one that is here already the file's version is taken. */
  async importFile(file) {
    this.wrong.textContent = "";
    this.file.value = "";
    if (!file) return;
    try {
      if (file.size > MOST_IMPORTED) throw new Error(`This file has ${bytes(file.size)}; ${bytes(MOST_IMPORTED)} can be read.`);
      const talks = imported(await file.text());
      const ids = new Set(talks.map((talk) => talk.id));
      this.talks = [...talks, ...this.talks.filter((talk) => !ids.has(talk.id))];
      storeTalks(this.talks);
      this.open(talks[0]);
    } catch (error) {
      this.wrong.textContent = error.message;
    }
  }

  save() {
    if (!this.talks.includes(this.talk)) this.talks.unshift(this.talk);
    storeTalks(this.talks);
  }

  // sending and receiving

  send(text, pictures = []) {
    if (this.writing || (!text.trim() && !pictures.length)) return false;
    const parent = lastOf(this.talk)?.id ?? ROOT;
    const isFirst = !Object.keys(this.talk.messages).length;
    if (this.talk.tour === STEPS.length) delete this.talk.tour; // over
    const message = add(this.talk, parent, { role: "user", content: text, pictures: pictures.length ? pictures : undefined });
    if (isFirst) this.talk.title = titleOf(text);
    this.answer(message);
    return true;
  }

  async answer(to) {
    const { talk } = this;
    const message = add(talk, to.id, { role: "assistant", model: this.model ?? undefined });
    const stop = new AbortController();
    this.writing = { stop, message };
    this.save();
    this.show();
    this.composer.isWriting = true;
    await reply(this.body(talk, to), message, stop.signal, () => this.changed(message));
    if (this.writing?.message === message) this.writing = null;
    this.composer.isWriting = this.writing !== null;
    message.at = Date.now();
    storeTalks(this.talks);
    this.show();
    if (!message.error && message.timings) say(`Reply: ${message.content.slice(0, 300)}`);
    await this.compare(message);
  }

  /** What reading the reused tokens, too, would have taken, at the speed that the server has measured. */
  async compare(message) {
    if (!message.timings) return;
    await this.feed.refresh();
    const { prompt_ms, restore_ms, cache_n } = message.timings;
    const seconds = this.feed.overview?.seconds_per_token;
    if (!seconds) return;
    message.cold_ms = prompt_ms - restore_ms + 1000 * seconds * cache_n;
    storeTalks(this.talks);
    const element = this.elementOf(message);
    if (element && !element.querySelector(".edit")) refresh(element, message);
  }

  /** The next of the three actions that prove the promise. */
  tour() {
    const { talk } = this;
    if (this.writing) return;
    talk.tour = (talk.tour ?? 0) + 1;
    if (talk.tour === 1) this.send(longText(this.n_ctx));
    else if (talk.tour === 2) this.send(QUESTION);
    else this.replace(path(talk).find((each) => each.content === QUESTION) ?? lastOf(talk), OTHER_QUESTION);
  }

  /** Another version of a user's message, which is answered; the old one stays as a branch. */
  replace(message, content) {
    this.answer(add(this.talk, message.parent, { role: "user", content, pictures: message.pictures }));
  }

  body(talk, to) {
    return {
      model: this.model ?? undefined, messages: toSend(talk, to.id, this.setup.system), stream: true,
      stream_options: { include_usage: true }, return_progress: true, prompt_cache_key: `page-${talk.id}`,
      ...sampled(this.setup),
      prompt_cache_diagnostics: this.setup.words || undefined, ...this.extra,
    };
  }

  stop() {
    this.writing?.stop.abort();
  }

  /** Answers what the results of a reply's tool calls are; calls and results belong together. */
  giveResults(message, texts) {
    let at = message;
    message.calls.forEach((call, nth) => { at = add(this.talk, at.id, { role: "tool", call: call.id, name: call.function.name, content: texts[nth] }); });
    this.answer(at);
  }

  // actions on a message

  edit(message) {
    const area = h("textarea", { "aria-label": "Edit the message", value: message.content });
    const element = this.elementOf(message);
    const done = () => {
      if (message.role === "user") return this.replace(message, area.value);
      add(this.talk, message.parent, { role: message.role, content: area.value, model: message.model });
      this.save();
      this.show();
    };
    const words = message.role === "user" ? "Send" : "Keep as a branch";
    element.querySelector(".body").replaceChildren(h("div", { class: "edit" }, area,
      h("div", { class: "row-end" }, button("Cancel", {}, () => this.show()), button(words, { class: "primary" }, done))));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); this.show(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
    });
    area.focus();
  }

  regenerate(message = lastOf(this.talk)) {
    if (this.writing || message?.role !== "assistant") return;
    this.answer(this.talk.messages[message.parent]);
  }

  branch(message) {
    this.talk.cut = message.id;
    this.show();
    this.composer.focus();
  }

  choose(message) {
    choose(this.talk, message);
    this.save();
    this.show();
  }

  // showing

  elementOf(message) {
    return this.inner.querySelector(`[data-id="${CSS.escape(message.id)}"]`);
  }

  changed(message) {
    if (this._frame) return;
    const wait_ms = Math.min(400, message.content.length / 50); // long replies are shown anew less often
    this._frame = setTimeout(() => requestAnimationFrame(() => {
      this._frame = 0;
      const element = this.elementOf(message);
      if (!element) return;
      const isAtEnd = this.isAtEnd();
      refresh(element, message);
      if (isAtEnd) this.toEnd();
    }), wait_ms);
  }

  isAtEnd() {
    return this.messages.scrollHeight - this.messages.scrollTop - this.messages.clientHeight < 90;
  }

  toEnd() {
    this.messages.scrollTo({ top: this.messages.scrollHeight, behavior: "instant" });
  }

  show() {
    this.showList();
    const shown = path(this.talk);
    const elements = shown.map((message) => messageElement(this.talk, message, this, this.writing !== null));
    if (shown.at(-1)?.error) elements.push(h("div", { class: "row-end" }, button("Try again", {}, () => this.regenerate())));
    const last = shown.at(-1);
    if (last?.calls?.length && !this.writing) elements.push(resultsForm(last, (texts) => this.giveResults(last, texts)));
    if (this.talk.cut) elements.push(this.branchNote());
    if (this.talk.tour && !this.writing) elements.push(this.tourSteps());
    this.inner.replaceChildren(...(elements.length ? elements : [this.empty()]));
    this.toEnd();
    this.dispatchEvent(new Event("change"));
    this.render(shown.filter((message) => !message.isWriting));
  }

  /** Shows messages as the server renders them, as soon as it has. */
  async render(messages) {
    const isAtEnd = this.isAtEnd();
    if (!await fetchRendered(messages.map((message) => message.content))) return;
    for (const message of messages) {
      const element = this.elementOf(message);
      if (element && !element.querySelector(".edit")) refresh(element, message);
    }
    if (isAtEnd) this.toEnd();
  }

  /** Marks the messages that something else on the page is about. */
  mark(ids) {
    for (const element of this.inner.querySelectorAll(".message")) element.toggleAttribute("data-marked", ids.includes(element.dataset.id));
  }

  branchNote() {
    const back = () => { this.talk.cut = null; this.show(); };
    return h("div", { class: "wait-branch" }, "What you write next branches off here.", button("Never mind", { class: "plain" }, back));
  }

  empty() {
    const kept = this.n_kept ? h("p", { class: "kept number" }, h("b", {}, count(this.n_kept)), ` ${stillWarm(this.n_kept)}: what was read before the server started is not read again.`) : null;
    return h("div", { class: "empty" }, h("h1", {}, "Read once, warm ever after"), kept,
      h("p", {}, "What the model has read, it does not read again. Say something, or see for yourself:"), this.tourSteps());
  }

  tourSteps() {
    const n_done = this.talk.tour ?? 0;
    return h("ol", { class: "tour", "aria-label": "Three actions that prove it" }, STEPS.map((step, nth) => h("li", { class: nth < n_done ? "done" : null },
      button([h("b", {}, step.title), h("span", {}, nth < n_done ? step.done : step.about)], { disabled: nth !== n_done, "data-step": nth + 1 }, () => this.tour()))));
  }

  showList() {
    const known = this.talks.includes(this.talk) ? this.talks : [this.talk, ...this.talks];
    const wanted = this.search.value.trim();
    const hits = new Map(known.map((talk) => [talk, wanted ? found(talk, wanted) : ""]));
    this.list.replaceChildren(...known.filter((talk) => hits.get(talk) !== null).map((talk) => h("li", { class: talk === this.talk ? "open" : null },
      button([talk.title, wanted ? h("span", { class: "snippet" }, hits.get(talk)) : null], { class: "title", "aria-current": talk === this.talk ? "true" : null }, () => this.open(talk)),
      button("×", { class: "plain gone", "aria-label": `Forget ${talk.title}` }, () => this.forget(talk)))));
  }

  /** How many conversations an earlier server left. */
  setKept(n_kept) {
    this.n_kept = n_kept;
    if (!path(this.talk).length) this.show();
  }

  setModel(model, sees, n_ctx) {
    this.model = model;
    this.n_ctx = n_ctx;
    this.composer.sees = sees;
  }
}

export const chatView = (feed) => new Chat(find("view-chat"), feed);
