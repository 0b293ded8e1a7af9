// Two small charts on canvases: bars of what was reused and read, and lines of how long first tokens took.

import { colours, fitted } from "./colours.js";
import { duration, short } from "./words.js";
import { niceStep } from "./treedraw.js";

const LEFT = 52;
const BOTTOM = 8;

/** One bar per request, the newest at the right. `rows`: {n_cached, n_read}. */
export function drawBars(canvas, rows) {
  const { context, width, height } = fitted(canvas);
  const c = colours();
  context.clearRect(0, 0, width, height);
  const n_most = Math.max(12, Math.floor((width - LEFT) / 8));
  const shown = rows.slice(-n_most);
  const n_shown = Math.max(24, shown.length);
  const most = Math.max(1, ...shown.map((row) => row.n_cached + row.n_read));
  const y = scale(context, width, height, most, short);
  const step = (width - LEFT - 4) / n_shown;
  const thick = Math.max(2, Math.min(16, step - 3));
  shown.forEach((row, nth) => {
    const x = width - (shown.length - nth) * step + (step - thick) / 2;
    const [base, middle, top] = [y(0), y(row.n_cached), y(row.n_cached + row.n_read)];
    block(context, x, middle, thick, base - middle, c.warm);
    block(context, x, top, thick, middle - top, c.cold);
  });
}

/** Lines over the requests; `series`: [{values, colour}], null where there is nothing. */
export function drawLines(canvas, series) {
  const { context, width, height } = fitted(canvas);
  const c = colours();
  context.clearRect(0, 0, width, height);
  const most = Math.max(1, ...series.flatMap((each) => each.values));
  const y = scale(context, width, height, most, duration);
  for (const { values, colour } of series) {
    const step = (width - LEFT - 8) / Math.max(1, values.length - 1);
    context.strokeStyle = c[colour];
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.beginPath();
    values.forEach((value, nth) => context.lineTo(LEFT + nth * step, y(value)));
    context.stroke();
    if (values.length) dot(context, LEFT + (values.length - 1) * step, y(values.at(-1)), c[colour]);
  }
}

function scale(context, width, height, most, words) {
  const c = colours();
  const step = niceStep(most / 3.2);
  const top = step * Math.ceil(most / step);
  const y = (value) => height - BOTTOM - (value / top) * (height - BOTTOM - 12);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let value = 0; value <= top; value += step) {
    context.strokeStyle = c.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(LEFT - 2, Math.round(y(value)) + 0.5);
    context.lineTo(width, Math.round(y(value)) + 0.5);
    context.stroke();
    context.fillStyle = c.muted;
    context.fillText(value === 0 ? "0" : words(value), LEFT - 8, y(value));
  }
  return y;
}

function block(context, x, y, width, height, colour) {
  if (height <= 0) return;
  context.fillStyle = colour;
  context.beginPath();
  context.roundRect(x, y, width, Math.max(1, height), Math.min(2.5, height / 2));
  context.fill();
}

function dot(context, x, y, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, 3.5, 0, 2 * Math.PI);
  context.fill();
}

export function percentile(values, share) {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** For each value the percentile of it and those just before. */
export function rolling(values, share, n_window = 24) {
  return values.map((_, at) => percentile(values.slice(Math.max(0, at + 1 - n_window), at + 1), share));
}
