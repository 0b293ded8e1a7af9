// The tree around the open conversation: it is one straight line, the trunk; what it left behind are ticks, every other conversation is one
// named row. Pure.
//
// Which nodes are of a conversation is told by lengths: the server says for each reply how many tokens its prompt and it had, and where in the
// tree it resumed; checkpoints lie at exactly these places. Two conversations of the same lengths are told apart by when they were used.

import { Axis, layout, lineage } from "./layout.js";
import { path, titleOf } from "./talk.js";

const NEAR = 48; // tokens that a template may put around a reply

/** The turns of messages that the server has counted: which tokens each covers, and its messages. */
export function turnsOf(talk, messages) {
  const turns = [];
  for (const message of messages) {
    const { timings } = message;
    if (message.role !== "assistant" || !timings) continue;
    const prompt = timings.cache_n + timings.prompt_n;
    const asked = talk.messages[message.parent];
    turns.push({ prompt, end: prompt + timings.predicted_n, resumed: timings.cache?.restored?.n_tokens ?? null, asked, reply: message, at: message.at ?? talk.at });
  }
  return turns;
}

/** The node where a conversation stands, or null: of those at its known lengths the one with most of them above it, and the deepest. */
export function locate(picture, turns, namespace) {
  const known = new Set(turns.flatMap(({ prompt, end, resumed }) => [prompt, end, resumed]));
  const at = turns.at(-1)?.at ?? 0;
  const scores = new Map();
  let best = null;
  for (const place of picture.places.values()) {
    const { node } = place;
    const isKnown = known.has(node.end) && node.end > 0;
    const score = (scores.get(place.parent) ?? 0) + (isKnown ? 1 : 0);
    scores.set(place, score);
    if (!isKnown || (namespace && node.namespace !== namespace)) continue;
    const found = { place, score, end: node.end, away: Math.abs((node.last_use ?? 0) * 1000 - at) };
    if (!best || isBetter(found, best)) best = found;
  }
  return best?.place ?? null;
}

const isBetter = (a, b) => (a.score - b.score || a.end - b.end || b.away - a.away) > 0;

/** The picture with the open conversation as its first row; the plain one if it is not in the tree. */
export function arrange(nodes, talks, open, namespace) {
  const picture = layout(nodes);
  const turns = open ? turnsOf(open, path(open)) : [];
  const here = turns.length ? locate(picture, turns, namespace) : null;
  if (!here) return picture;
  const trunk = lineage(here).reverse();
  const branches = branchesOf(picture, trunk);
  const names = namesOf(picture, talks, open, namespace);
  const all = turnsOf(open, Object.values(open.messages));
  const [ticks, others] = split(branches, (branch) => !names.has(branch) && isLeftBehind(branch, all));
  others.sort((a, b) => b.used - a.used);
  return placed(picture, trunk, ticks, others, { here, turns, names });
}

/** Everything beside the trunk (each place learns its branch): the first node of each branch, what is below it, how deep it goes, and when it was used. */
function branchesOf(picture, trunk) {
  const onTrunk = new Set(trunk);
  const of = new Map(); // place → branch
  const found = [];
  for (const place of picture.places.values()) {
    if (onTrunk.has(place)) continue;
    let branch = of.get(place.parent);
    if (!branch) {
      branch = { first: place, places: [], end: 0, used: 0, n_ends: 0 };
      found.push(branch);
    }
    of.set(place, branch);
    place.branch = branch;
    branch.places.push(place);
    branch.end = Math.max(branch.end, place.node.end);
    branch.used = Math.max(branch.used, place.node.last_use ?? 0);
    if (!place.children.length) branch.n_ends += 1;
  }
  return found;
}

/** By branch, what this browser knows about it: another conversation, or another version of the open one. */
function namesOf(picture, talks, open, namespace) {
  const spots = [];
  for (const talk of talks) {
    if (talk === open) continue;
    const place = locate(picture, turnsOf(talk, path(talk)), namespace);
    if (place) spots.push([place, { talk, words: talk.title }]);
  }
  const shown = new Set(path(open));
  for (const turn of turnsOf(open, Object.values(open.messages))) {
    if (shown.has(turn.reply) || shown.has(turn.asked)) continue;
    const place = locate(picture, [turn], namespace);
    if (place) spots.push([place, { words: `instead: ${titleOf(turn.asked?.content ?? "")}` }]);
  }
  const names = new Map();
  for (const [{ branch }, name] of spots) if (branch && !names.has(branch)) names.set(branch, name);
  return names;
}

/** Whether a branch is what a turn of the conversation left: its thinking, which the next prompt does not have, or its next turn, read ahead. */
function isLeftBehind(branch, turns) {
  return turns.some(({ prompt, end }) => branch.first.node.start >= prompt - NEAR && branch.end <= end + NEAR);
}

function placed(picture, trunk, ticks, others, about) {
  const axis = new Axis([...trunk.map((place) => place.node.end), ...others.map((branch) => branch.end)]);
  const rows = [trunk, ...others.map((branch) => branch.places.sort((a, b) => a.node.end - b.node.end))];
  rows.forEach((row, nth) => row.forEach((place, at) => Object.assign(place, { row: nth, nth: at, isTick: false })));
  for (const branch of ticks) for (const place of branch.places) Object.assign(place, { row: 0, isTick: true });
  for (const place of picture.places.values()) [place.from, place.to] = [axis.at(place.node.start), axis.at(place.node.end)];
  const labels = others.map((branch, nth) => {
    const name = about.names.get(branch);
    return { row: nth + 1, from: branch.first.from, to: axis.at(branch.end), words: name?.words ?? unnamed(branch), isOwn: Boolean(name), talk: name?.talk ?? null };
  });
  const n_tokens = Math.max(...rows.map((row) => row.at(-1)?.node.end ?? 0));
  return { places: picture.places, rows, axis, n_tokens, labels, ticks: ticks.map((branch) => branch.first), here: about.here, turns: spans(about.turns, axis) };
}

const unnamed = (branch) => branch.places.map((place) => place.node.words).find(Boolean) ?? (branch.n_ends > 1 ? `${branch.n_ends} conversations from elsewhere` : "a conversation from elsewhere");

/** The part of the trunk that each turn added. */
function spans(turns, axis) {
  return turns.map((turn, nth) => {
    const [start, end] = [turns[nth - 1]?.prompt ?? 0, nth === turns.length - 1 ? turn.end : turn.prompt];
    return { nth: nth + 1, start, end, from: axis.at(start), to: axis.at(end), words: titleOf(turn.asked?.content ?? ""), ids: [turn.asked?.id, turn.reply.id] };
  });
}

function split(all, holds) {
  const groups = [[], []];
  for (const each of all) groups[holds(each) ? 0 : 1].push(each);
  return groups;
}
