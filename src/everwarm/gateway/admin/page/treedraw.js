// Drawing the prefix tree. What stands still is drawn once onto a canvas of its own; what moves is drawn over it.

import { colours, fitted } from "./colours.js";
import { lineage, tierOf } from "./layout.js";

const LEFT = 26;
const TOP = 34;
const RULER = 24;
const CONTROL = /<\|?\/?[a-z_]{1,24}\|?>/gi; // what templates put around messages
const LINES = { none: { alpha: 1, dash: [] }, disk: { alpha: 0.5, dash: [3, 3] }, ram: { alpha: 0.5, dash: [] }, device: { alpha: 0.85, dash: [] } }; // KV by its hottest tier, which is drawn last
const ROOMY = 26; // pixels of a row from which on words are shown

export class Camera {
  constructor() {
    this.x = 0; // place of the axis at the left edge
    this.y = 0; // row at the upper edge
    this.scale = 1; // pixels per unit of the axis
    this.row = 34; // pixels per row
    this.isMoved = false; // by a person: then it is left alone
  }

  fit(picture, width, height) {
    const room = Math.max(60, width - LEFT - 60);
    this.scale = room / picture.axis.length;
    this.row = Math.min(58, Math.max(1.2, (height - TOP - 50) / Math.max(1, picture.rows.length)));
    this.x = 0;
    this.y = 0;
  }

  px(x) { return LEFT + (x - this.x) * this.scale; }
  py(row) { return TOP + (row - this.y + 0.5) * this.row; }
  x_at(px) { return (px - LEFT) / this.scale + this.x; }
  rowAt(py) { return Math.floor((py - TOP) / this.row + this.y); }

  pan(dx, dy) {
    this.x -= dx / this.scale;
    this.y -= dy / this.row;
    this.isMoved = true;
  }

  zoom(factor, px, py) {
    const [x, row] = [this.x_at(px), (py - TOP) / this.row + this.y];
    this.scale = Math.min(200, Math.max(1e-5, this.scale * factor));
    this.row = Math.min(80, Math.max(0.4, this.row * factor ** 0.7));
    this.x = x - (px - LEFT) / this.scale;
    this.y = row - (py - TOP) / this.row;
    this.isMoved = true;
  }
}

export class TreeDrawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.still = document.createElement("canvas");
    this.camera = new Camera();
    this.isStale = true;
  }

  /** Everything; `marks`: hover, selected (places), span (of the trunk), running ({place, x}). */
  draw(picture, marks, now_ms) {
    const { context, width, height } = fitted(this.canvas);
    if (!width || !height) return;
    if (this.still.width !== this.canvas.width || this.still.height !== this.canvas.height) this.isStale = true;
    if (this.isStale) this._drawStill(picture, width, height);
    this.isStale = false;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.still, 0, 0, width, height);
    if (marks.hover) this._path(context, marks.hover, colours().muted, 1.5);
    if (marks.span) this._span(context, marks.span);
    if (marks.selected) this._selected(context, marks.selected);
    for (const running of marks.running) this._running(context, running, now_ms);
  }

  _drawStill(picture, width, height) {
    this.still.width = this.canvas.width;
    this.still.height = this.canvas.height;
    const context = this.still.getContext("2d");
    context.setTransform(this.canvas.width / width, 0, 0, this.canvas.height / height, 0, 0);
    const named = picture.rows.length ? ticks(picture.axis, this.camera, width) : [];
    this._grid(context, picture.axis, named, height);
    const seen = this._visible(picture, width, height);
    this._connectors(context, seen);
    this._segments(context, seen);
    this._checkpoints(context, seen);
    if (picture.labels) this._trunk(context, picture, width);
    else if (this.camera.row >= ROOMY) this._words(context, seen, width);
    this._ruler(context, picture.axis, named, width);
  }

  _visible(picture, width, height) {
    const { camera } = this;
    const [top, bottom] = [Math.max(0, camera.rowAt(0) - 1), Math.min(picture.rows.length - 1, camera.rowAt(height) + 1)];
    const [left, right] = [camera.x_at(0), camera.x_at(width)];
    const seen = [];
    for (let row = top; row <= bottom; row += 1) {
      for (const place of picture.rows[row]) {
        if (place.from > right) break;
        if (place.to >= left) seen.push(place);
      }
    }
    return seen;
  }

  _grid(context, axis, named, height) {
    context.strokeStyle = colours().line;
    context.lineWidth = 1;
    context.globalAlpha = 0.6;
    for (const token of named) {
      const x = Math.round(this.camera.px(axis.at(token))) + 0.5;
      line(context, x, RULER, x, height);
    }
    context.globalAlpha = 1;
  }

  _ruler(context, axis, named, width) {
    const c = colours();
    context.fillStyle = c.raised;
    context.fillRect(0, 0, width, RULER);
    context.fillStyle = c.muted;
    context.font = `11px ${font()}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const token of named) {
      const x = this.camera.px(axis.at(token));
      context.fillText(token === 0 ? "0 tokens" : token.toLocaleString("en"), token === 0 ? x + 16 : x, 13);
    }
  }

  _connectors(context, seen) {
    const { camera } = this;
    const bend = this._bend();
    context.strokeStyle = colours().muted;
    context.globalAlpha = 0.4;
    context.lineWidth = camera.row > 8 ? 1.5 : 0.8;
    context.beginPath();
    for (const { from, parent, row, isTick } of seen) {
      if (!parent || parent.row === row || isTick) continue;
      const [x, above, below] = [camera.px(from), camera.py(parent.row), camera.py(row)];
      context.moveTo(x, above);
      context.lineTo(x, below - bend);
      context.quadraticCurveTo(x, below, x + bend, below);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  _segments(context, seen) {
    const { camera } = this;
    const c = colours();
    const thick = Math.max(0.8, Math.min(4, camera.row * 0.28));
    const bend = this._bend();
    context.lineCap = "butt";
    for (const [tier, { alpha, dash }] of Object.entries(LINES)) {
      context.strokeStyle = tier === "none" ? c.line : c.warm;
      context.globalAlpha = alpha;
      context.setLineDash(dash);
      context.lineWidth = thick;
      context.beginPath();
      for (const { node, parent, row, from, to } of seen) {
        if ((tierOf(node.kv.tiers) ?? "none") !== tier || node.end === node.start) continue;
        const y = camera.py(row);
        const x = camera.px(from) + (parent && parent.row !== row ? bend : 0);
        context.moveTo(x, y);
        context.lineTo(Math.max(x + 0.5, camera.px(to)), y);
      }
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /** On the device a disc, in RAM a ring, on disk a square: all of them are warm. */
  _checkpoints(context, seen) {
    const { camera } = this;
    const c = colours();
    const size = this._size();
    context.strokeStyle = c.warm;
    context.lineWidth = Math.min(2.2, size * 0.5);
    for (const tier of ["device", "ram", "disk"]) {
      context.fillStyle = tier === "device" ? c.warm : c["warm-soft"];
      context.beginPath();
      for (const { node, row, to } of seen) {
        if (!node.checkpoint || tierOf(node.checkpoint.tiers) !== tier) continue;
        const [x, y] = [camera.px(to), camera.py(row)];
        if (size < 2.5 || tier === "disk") context.rect(x - size, y - size, 2 * size, 2 * size);
        else { context.moveTo(x + size, y); context.arc(x, y, size, 0, 2 * Math.PI); }
      }
      context.fill();
      if (tier !== "device") context.stroke();
    }
    this._pins(context, seen, size, c);
  }

  _pins(context, seen, size, c) {
    context.strokeStyle = c.ink;
    context.lineWidth = 1.4;
    context.beginPath();
    for (const { node, row, to } of seen) {
      if (!node.pinned || node.end === 0) continue;
      const [x, y] = [this.camera.px(to), this.camera.py(row)];
      context.moveTo(x + size + 3, y);
      context.arc(x, y, size + 3, 0, 2 * Math.PI);
    }
    context.stroke();
  }

  _words(context, seen, width) {
    const { camera } = this;
    context.font = `11.5px ${font()}`;
    context.fillStyle = colours().muted;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    for (const { node, parent, row, from, to } of seen) {
      const words = (node.words ?? "").replace(CONTROL, " ").trim();
      const x = Math.max(4, camera.px(from) + (parent && parent.row !== row ? 16 : 7));
      const room = Math.min(width, camera.px(to)) - x - 6;
      if (words && room > 34) context.fillText(shortened(context, words, room), x, camera.py(row) - 7);
    }
  }

  /** What the open conversation is made of, where it stands, what it left behind, and the names of the others. */
  _trunk(context, picture, width) {
    const { camera } = this;
    const c = colours();
    const y = camera.py(0);
    context.strokeStyle = c.muted;
    context.lineWidth = 1.4;
    for (const tick of picture.ticks) line(context, camera.px(tick.from), y + 4, camera.px(tick.from), y + 10);
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.font = `11.5px ${font()}`;
    for (const turn of picture.turns) {
      const [x, end] = [Math.max(4, camera.px(turn.from) + 6), camera.px(turn.to)];
      context.fillStyle = c.line;
      context.fillRect(camera.px(turn.from), y - 22, 1, 18);
      context.fillStyle = c.ink;
      const words = shortened(context, `${turn.nth} ${turn.words}`, Math.min(width, end) - x - 4) || (end - x > 10 ? String(turn.nth) : "");
      context.fillText(words, x, y - 9);
    }
    if (camera.row >= 16) for (const label of picture.labels) this._name(context, label, width);
    if (picture.here) this._here(context, picture.here, width);
  }

  _name(context, label, width) {
    const { camera } = this;
    const x = Math.max(4, camera.px(label.from) + this._bend() + 4);
    context.font = `${label.isOwn ? "" : "italic "}11.5px ${font()}`;
    context.fillStyle = label.isOwn ? colours().ink : colours().muted;
    context.fillText(shortened(context, label.words.replace(CONTROL, " ").trim(), Math.max(60, width - x - 8)), x, camera.py(label.row) - 8);
  }

  _here(context, place, width) {
    const c = colours();
    const [x, y] = [this.camera.px(place.to), this.camera.py(0)];
    ring(context, x, y, this._size() + 4, c.ink, 2);
    context.font = `600 11.5px ${font()}`;
    context.fillStyle = c.ink;
    const words = "you are here";
    const half = context.measureText(words).width / 2;
    context.textAlign = "center";
    context.fillText(words, Math.max(half + 4, Math.min(width - half - 4, x)), y + 24);
    context.textAlign = "left";
  }

  /** The part of the trunk that a message is. */
  _span(context, { from, to }) {
    const y = this.camera.py(0);
    context.strokeStyle = colours().ink;
    context.lineWidth = 3;
    line(context, this.camera.px(from), y + 7, this.camera.px(to), y + 7);
  }

  /** A node's lineage, bent as its lines are, with its checkpoints on top. */
  _path(context, place, colour, thick) {
    const { camera } = this;
    const bend = this._bend();
    const all = lineage(place);
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.beginPath();
    for (const { parent, row, from, to } of all) {
      const y = camera.py(row);
      const isBranch = parent !== null && parent.row !== row;
      context.moveTo(camera.px(to), y);
      context.lineTo(camera.px(from) + (isBranch ? bend : 0), y);
      if (!isBranch) continue;
      context.quadraticCurveTo(camera.px(from), y, camera.px(from), y - bend);
      context.lineTo(camera.px(from), camera.py(parent.row));
    }
    context.stroke();
    this._checkpoints(context, all);
    ring(context, camera.px(place.to), camera.py(place.row), this._size() + 3.5, colour, 1.8);
  }

  _bend() {
    return this.camera.row > 8 ? Math.min(14, this.camera.row * 0.8) : 0;
  }

  _size() {
    return Math.max(0.9, Math.min(5.5, this.camera.row * 0.24));
  }

  _selected(context, place) {
    this._path(context, place, colours().ink, 2);
  }

  _running(context, { place, x: along }, now_ms) {
    const { camera } = this;
    const c = colours();
    const [x, y] = [camera.px(along), camera.py(place.row)];
    this._path(context, place, c.warm, 2.4);
    context.setLineDash([4, 4]);
    context.strokeStyle = c.cold;
    line(context, camera.px(place.to), y, x, y);
    context.setLineDash([]);
    const beat = 0.5 + 0.5 * Math.sin(now_ms / 260);
    context.globalAlpha = 0.14 + 0.1 * beat;
    disc(context, x, y, 13 + 3 * beat, c.ink);
    context.globalAlpha = 1;
    disc(context, x, y, 6, c.raised);
    ring(context, x, y, 6, c.ink, 2.4);
  }
}

const font = () => getComputedStyle(document.body).fontFamily;

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function disc(context, x, y, r, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, r, 0, 2 * Math.PI);
  context.fill();
}

function ring(context, x, y, r, colour, thick) {
  context.strokeStyle = colour;
  context.lineWidth = thick;
  context.beginPath();
  context.arc(x, y, r, 0, 2 * Math.PI);
  context.stroke();
}

/** Tokens to name at the top: round ones, as many as have room. */
function ticks(axis, camera, width) {
  const named = [];
  let [last, x] = [-Infinity, Math.max(0, camera.x)];
  for (let nth = 0; nth < 64 && camera.px(x) < width; nth += 1, x += 92 / camera.scale) {
    const step = niceStep(Math.max(1, axis.token(x + 80 / camera.scale) - axis.token(x)) / 2);
    const token = Math.ceil(axis.token(x) / step) * step;
    const px = camera.px(axis.at(token));
    if (px - last < 62) continue;
    named.push(token);
    last = px;
  }
  return named;
}

export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  return Math.max(1, [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least));
}

function shortened(context, text, room) {
  if (text.length * 4 < room && context.measureText(text).width <= room) return text;
  let low = 0;
  let high = Math.min(text.length, Math.ceil(room / 3));
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}
