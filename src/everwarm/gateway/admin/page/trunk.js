// The tree around the open conversation: it is one straight line, the trunk; what it left behind are ticks, every other conversation is one
// named row. Pure.
//
// Which nodes are of a conversation is told by lengths: the server says for each reply how many tokens its prompt and it had, and where in the
// tree it resumed; checkpoints lie at exactly these places. Two conversations of the same lengths are told apart by when they were used.

import { Axis, countEnds, layout, lineage } from "./layout.js";
import { path, titleOf } from "./talk.js";

const FLAT = 0.3; // of the axis: a turn of twenty tokens is a third as wide as one of a thousand
const NEAR = 48; // tokens that a template may put around a reply

/** The turns of messages that the server has counted: which tokens each covers, and its messages. */
function turnsOf(talk, messages) {
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
function locate(picture, turns, namespace) {
  const known = new Set(turns.flatMap(({ prompt, end, resumed }) => [prompt, end, resumed]));
  const at = turns.at(-1)?.at ?? 0;
  const seen = new Map(); // how many known lengths a path has, and when it was last used; parents come before children
  let best = null;
  for (const place of picture.places.values()) {
    const { node } = place;
    const isKnown = known.has(node.end) && node.end > 0;
    const above = seen.get(place.parent) ?? { score: 0, used: 0 };
    const found = { place, score: above.score + (isKnown ? 1 : 0), end: node.end, used: node.last_use ?? above.used };
    found.away = Math.abs(1000 * found.used - at);
    seen.set(place, found);
    if (isKnown && (!namespace || node.namespace === namespace) && (!best || isBetter(found, best))) best = found;
  }
  return best?.place ?? null;
}

const isBetter = (a, b) => (a.score - b.score || a.end - b.end || b.away - a.away) > 0;

/** The picture with the open conversation as its first row, or one of the others if it is not in the tree; the plain one if none is. */
export function arrange(nodes, talks, open, namespace) {
  const picture = layout(nodes);
  const main = [open, ...talks].map((talk) => standing(picture, talk, namespace)).find(({ end }) => end !== null);
  if (!main) return picture;
  const { talk, turns, end } = main;
  const trunk = lineage(end).reverse();
  const branches = branchesOf(picture, trunk);
  const names = namesOf(picture, talks, talk, namespace);
  const all = turnsOf(talk, Object.values(talk.messages));
  const [ticks, others] = split(branches, (branch) => !names.has(branch) && isLeftBehind(branch, all));
  others.sort((a, b) => b.used - a.used);
  return placed(picture, trunk, ticks, others, { here: talk === open ? end : null, turns, names });
}

/** A conversation with the node where it stands; null: it is not in the tree. */
function standing(picture, talk, namespace) {
  const turns = turnsOf(talk, path(talk));
  return { talk, turns, end: turns.length ? locate(picture, turns, namespace) : null };
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
      branch = { first: place, places: [], end: 0, used: 0 };
      found.push(branch);
    }
    of.set(place, branch);
    place.branch = branch;
    branch.places.push(place);
    branch.end = Math.max(branch.end, place.node.end);
    branch.used = Math.max(branch.used, place.node.last_use ?? 0);
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
  const ends = about.turns.map((turn) => turn.prompt);
  const axis = new Axis([...ends, trunk.at(-1).node.end, ...others.map((branch) => branch.end)], FLAT);
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

function unnamed(branch) {
  const n = countEnds(branch.places);
  return branch.places.map((place) => place.node.words).find(Boolean) ?? (n > 1 ? `${n} conversations from elsewhere` : "a conversation from elsewhere");
}

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
