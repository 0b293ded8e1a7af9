// Where messages are written: text, images, send and stop.

import { button, h, say } from "./dom.js";

const MOST_IMAGES = 8;
const MOST_BYTES = 12 << 20;

export class Composer {
  constructor({ send, stop }) {
    this._send = send;
    this._sees = false;
    this._images = [];
    this.area = h("textarea", { id: "say", rows: "1", placeholder: "Write a message", "aria-label": "Message", on: { input: () => this._grow(), keydown: (event) => this._key(event) } });
    this.file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, hidden: true, on: { change: () => this._attach([...this.file.files]) } });
    this.attach = button("Image", { class: "plain", id: "attach", hidden: true, title: "Attach an image" }, () => this.file.click());
    this.sendButton = button("Send", { class: "primary", id: "send" }, () => this.send());
    this.stopButton = button("Stop", { id: "stop", hidden: true, title: "Stop the reply (Esc)" }, stop);
    this.shown = h("div", { class: "attached" });
    this.element = h("div", { class: "composer" }, h("div", { class: "box", on: { paste: (event) => this._attach([...event.clipboardData.files]) } },
      this.shown, this.area,
      h("div", { class: "tools" }, this.attach, this.file, h("span", { class: "hint" }, "Enter sends, Shift+Enter is a new line"), this.stopButton, this.sendButton)));
  }

  set isWriting(isWriting) {
    this.stopButton.hidden = !isWriting;
    this.sendButton.hidden = isWriting;
  }

  set sees(sees) {
    this._sees = sees;
    this.attach.hidden = !sees;
  }

  focus() {
    this.area.focus();
  }

  send() {
    if (!this._send(this.area.value, this._images)) return;
    this.area.value = "";
    this._images = [];
    this._show();
    this._grow();
  }

  _key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  _grow() {
    this.area.style.height = "auto";
    this.area.style.height = `${this.area.scrollHeight}px`;
  }

  /** Takes images that are dropped anywhere on an element. */
  takeDrops(element) {
    const over = (isOver) => element.classList.toggle("drop", isOver && this._sees);
    element.addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
    element.addEventListener("dragleave", () => over(false));
    element.addEventListener("drop", (event) => {
      event.preventDefault();
      over(false);
      this._attach([...event.dataTransfer.files]);
    });
  }

  async _attach(files) {
    if (files.length && !this._sees) say("This model does not take images.");
    if (!this._sees) return;
    for (const file of files) {
      if (!/^image\/(png|jpeg|webp|gif)$/.test(file.type) || file.size > MOST_BYTES || this._images.length >= MOST_IMAGES) continue;
      this._images.push(await asUrl(file));
    }
    this.file.value = "";
    this._show();
  }

  _show() {
    this.shown.replaceChildren(...this._images.map((url, nth) => button(h("img", { src: url, alt: "" }), { "aria-label": "Take this image out" }, () => {
      this._images.splice(nth, 1);
      this._show();
    })));
  }
}

function asUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
