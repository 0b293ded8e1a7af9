// What this browser remembers: conversations and settings. Where there is no room the oldest go first, pictures before words.

import { ROOT } from "./talk.js";

const TALKS = "everwarm.talks";
const SETUP = "everwarm.setup";
const MOST_TALKS = 60;
const MOST_MESSAGES = 5000; // of a conversation from a file
const MOST_CHARS = 4_000_000; // of a message from a file
const ID = /^[\w-]{1,80}$/;
const ROLES = ["user", "assistant", "tool"];

export function load(key, usual) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null") ?? usual;
  } catch {
    return usual;
  }
}

export function store(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const loadTalks = () => readTalks(load(TALKS, []));

export function storeTalks(talks) {
  const newest = [...talks].filter((talk) => Object.keys(talk.messages).length).sort((a, b) => b.at - a.at).slice(0, MOST_TALKS);
  if (store(TALKS, newest)) return;
  for (let left = newest.length; left > 0; left = Math.floor(left / 2)) {
    if (store(TALKS, newest.slice(0, left).map(withoutPictures))) return;
  }
}

function withoutPictures(talk) {
  const messages = Object.fromEntries(Object.entries(talk.messages).map(([id, each]) => [id, { ...each, pictures: undefined }]));
  return { ...talk, messages };
}

// conversations in files

/** All conversations as the text of a file. */
export const exported = (talks) => JSON.stringify({ everwarm: "conversations", version: 1, talks }, null, 1);

/** The conversations of a file's text; throws with what is wrong. */
export function imported(text) {
  let found;
  try { found = JSON.parse(text); } catch { throw new Error("This file is not JSON."); }
  if (found?.everwarm !== "conversations" || !Array.isArray(found.talks)) throw new Error("This file has no conversations that Everwarm exported.");
  const talks = readTalks(found.talks.slice(0, MOST_TALKS));
  if (!talks.length) throw new Error("No conversation in this file can be read.");
  return talks;
}

/** What is whole of conversations from a file or from an earlier version of this page. */
function readTalks(given) {
  return (Array.isArray(given) ? given : []).filter((talk) => talk?.messages && talk.chosen && isId(talk.id)).map(readTalk);
}

function readTalk(talk) {
  const messages = {};
  for (const message of Object.values(talk.messages).slice(0, MOST_MESSAGES)) if (isMessage(message)) messages[message.id] = readMessage(message);
  const isChild = ([parent, id]) => (parent === ROOT || Object.hasOwn(messages, parent)) && Object.hasOwn(messages, id) && messages[id].parent === parent;
  const chosen = Object.fromEntries(Object.entries(talk.chosen).filter(isChild));
  const tour = Number.isInteger(talk.tour) ? { tour: talk.tour } : {};
  return { id: talk.id, title: isText(talk.title) ? talk.title.slice(0, 200) : "Conversation", at: Number(talk.at) || 0, messages, chosen, cut: null, ...tour };
}

const isId = (id) => typeof id === "string" && ID.test(id) && id !== "__proto__" && id !== "constructor";
const isText = (value) => typeof value === "string";
const isTextOrNone = (value) => value === undefined || value === null || isText(value);
const areNumbers = (given, ...names) => names.every((name) => Number.isFinite(given?.[name]));
const listed = (value) => (Array.isArray(value) && value.length ? value : undefined);

function isMessage(message) {
  return isId(message?.id) && isId(message.parent) && message.id !== message.parent && ROLES.includes(message.role) && isText(message.content) && message.content.length <= MOST_CHARS;
}

/** The fields that the page uses, those of the wrong type left out. */
function readMessage(message) {
  const { id, parent, role, content } = message;
  const texts = ["thinking", "model", "call", "name", "finish"].filter((name) => isText(message[name])).map((name) => [name, message[name]]);
  const numbers = ["at", "cold_ms"].filter((name) => Number.isFinite(message[name])).map((name) => [name, message[name]]);
  const calls = listed(message.calls)?.filter((call) => isText(call?.function?.name) && isText(call.function.arguments))
    .map((call) => ({ id: String(isText(call.id) ? call.id : ""), type: "function", function: { name: call.function.name, arguments: call.function.arguments } }));
  const { status, code, n_prompt, n_ctx } = message.error ?? {};
  const error = isText(message.error?.message) ? { error: { message: message.error.message, status: Number(status) || 0, code: isText(code) ? code : "", n_prompt: Number(n_prompt) || 0, n_ctx: Number(n_ctx) || 0 } } : {};
  const more = { pictures: listed(message.pictures)?.filter(isText), calls: listed(calls), timings: readTimings(message.timings), isStopped: message.isStopped === true || undefined };
  return { id, parent, role, content, ...Object.fromEntries([...texts, ...numbers]), ...error, ...more, isWriting: false };
}

function readTimings(timings) {
  if (!areNumbers(timings, "cache_n", "prompt_n", "prompt_ms", "restore_ms", "queue_ms", "predicted_n", "predicted_ms", "predicted_per_second")) return undefined;
  return { ...timings, cache: isCache(timings.cache) ? timings.cache : null };
}

function isCache(cache) {
  if (!areNumbers(cache, "n_shared") || !isText(cache.reason) || !isTextOrNone(cache.again)) return false;
  const { restored, diverged } = cache;
  return (!restored || (areNumbers(restored, "n_tokens") && isText(restored.kind) && isText(restored.how)))
    && (!diverged || (areNumbers(diverged, "at") && ["before", "known", "given"].every((name) => isTextOrNone(diverged[name]))));
}

export const loadSetup = () => ({ system: "", temperature: 0.7, max_tokens: 1024, words: true, sampling: {}, stop: "", tools: "", ...load(SETUP, {}) });
export const storeSetup = (setup) => store(SETUP, setup);
