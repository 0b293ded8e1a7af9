// What this browser remembers: conversations and settings. Where there is no room the oldest go first, pictures before words.

const TALKS = "everwarm.talks";
const SETUP = "everwarm.setup";
const MOST_TALKS = 60;

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

export function loadTalks() {
  const talks = load(TALKS, []);
  const good = Array.isArray(talks) ? talks.filter((talk) => talk?.messages && talk.chosen) : [];
  for (const talk of good) for (const message of Object.values(talk.messages)) message.isWriting = false;
  return good;
}

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

export const loadSetup = () => ({ system: "", temperature: 0.7, max_tokens: 1024, words: true, ...load(SETUP, {}) });
export const storeSetup = (setup) => store(SETUP, setup);
