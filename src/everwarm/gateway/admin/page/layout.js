// Where the nodes of the prefix tree are: x along the tokens, y in rows. Pure, one pass: parents come before children.
//
// Tokens are not spaced evenly: a stretch in which nothing begins or ends gets the root of its length, or a long system prompt would
// press everything that happens after it into a corner.

/**
 * The first child goes on in its parent's row, every other one begins a new row below.
 * Nodes whose parent is not there (a page was lost) are left out.
 */
export function layout(nodes) {
  const places = new Map();
  const rows = [];
  let most = 1;
  for (const node of nodes) {
    const parent = node.parent === null ? null : places.get(node.parent);
    if (parent === undefined) continue;
    const isFirst = parent !== null && parent.children.length === 0;
    const row = isFirst ? parent.row : rows.length;
    if (row === rows.length) rows.push([]);
    const place = { node, parent, row, nth: rows[row].length, children: [] };
    parent?.children.push(place);
    rows[row].push(place);
    places.set(node.id, place);
    if (node.end > most) most = node.end;
  }
  const axis = new Axis(nodes.map((node) => node.end));
  for (const place of places.values()) [place.from, place.to] = [axis.at(place.node.start), axis.at(place.node.end)];
  return { places, rows, n_tokens: most, axis };
}

/** From tokens to places along x, and back. Straight between two stops; `power` of 1 would space tokens evenly, 0 stops. */
export class Axis {
  constructor(ends, power = 0.5) {
    this.power = power;
    this.stops = [...new Set([0, ...ends])].sort((a, b) => a - b);
    this.places = [0];
    for (let nth = 1; nth < this.stops.length; nth += 1) this.places.push(this.places[nth - 1] + (this.stops[nth] - this.stops[nth - 1]) ** power);
    this.length = Math.max(1, this.places.at(-1));
  }

  at(token) {
    const beyond = token - this.stops.at(-1); // a reply that is being written
    return beyond > 0 ? this.places.at(-1) + beyond ** this.power : between(this.stops, this.places, token);
  }

  token(place) {
    const beyond = place - this.places.at(-1);
    return beyond > 0 ? this.stops.at(-1) + beyond ** (1 / this.power) : between(this.places, this.stops, place);
  }
}

function between(from, to, value) {
  const nth = Math.min(from.length - 1, first(from.length, (each) => from[each] >= value));
  if (nth === 0) return to[0];
  return to[nth - 1] + ((to[nth] - to[nth - 1]) * (value - from[nth - 1])) / (from[nth] - from[nth - 1]);
}

/** The first of `n` numbers for which something holds, from which on it always does. */
function first(n, holds) {
  let low = 0;
  let high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The node of a row that covers a place along x, or the nearest to it. */
export function nearest(rows, row, x) {
  const all = rows[row];
  if (!all?.length) return null;
  return all[Math.min(all.length - 1, first(all.length, (nth) => all[nth].to >= x))];
}

/** A node and all its ancestors. */
export function lineage(place) {
  const found = [];
  for (let at = place; at; at = at.parent) found.push(at);
  return found;
}

const OF_MESSAGES = new Set(["stable", "boundary", "branch", "learned", "every-n"]); // checkpoints that a prompt leaves on its way, not at its end

/**
 * How many conversations these places are. Each end is one, unless no message ends between it and the fork before it: there are several such ends
 * after one turn (the reply as it was, and as the next prompt has it), and after the next turn they are left behind.
 */
export function countEnds(places) {
  const all = [...places];
  const hasMessages = new Set();
  for (const place of [...all].reverse()) {
    if (OF_MESSAGES.has(place.node.checkpoint?.kind) || place.children.some((child) => hasMessages.has(child))) hasMessages.add(place);
  }
  const ends = new Set();
  for (const place of all) if (place.parent && !place.children.length) ends.add(endOf(place, hasMessages));
  ends.delete(null);
  return ends.size;
}

/** What stands for the conversation that ends here: the end, or the fork before it; null if it goes on elsewhere. */
function endOf(place, hasMessages) {
  let top = place;
  while (!hasMessages.has(top) && top.parent.parent && top.parent.children.length === 1) top = top.parent;
  const fork = top.parent;
  if (hasMessages.has(top) || !fork.parent) return place;
  return fork.children.some((other) => hasMessages.has(other)) ? null : fork;
}

/** The hottest tier that something is in. */
export function tierOf(tiers) {
  return ["device", "ram", "disk"].find((tier) => tiers.includes(tier)) ?? null;
}
