// Numbers and reasons in words. Pure.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => whole.format(n);

export function short(n) {
  if (n < 10_000) return count(n);
  if (n < 1_000_000) return `${(n / 1000).toFixed(n < 100_000 ? 1 : 0)} k`;
  return `${(n / 1e6).toFixed(1)} M`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (n >= 1024 && step < units.length - 1) { n /= 1024; step += 1; }
  return `${step === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)} ${units[step]}`;
}

export function duration(ms) {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  if (ms < 120_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${(ms / 60_000).toFixed(1)} min`;
}

export function ago(unix_s, now_s = Date.now() / 1000) {
  const s = Math.max(0, now_s - unix_s);
  if (s < 2) return "now";
  if (s < 60) return `${s.toFixed(0)} s ago`;
  if (s < 3600) return `${(s / 60).toFixed(0)} min ago`;
  if (s < 86_400) return `${(s / 3600).toFixed(0)} h ago`;
  return `${(s / 86_400).toFixed(0)} d ago`;
}

export const clock = (unix_ms) => new Date(unix_ms).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

export const tierName = (tier) => (tier === "ram" ? "RAM" : tier);
export const tierPlace = (tier) => ({ device: "on the device", ram: "in RAM", disk: "on disk" })[tier] ?? `in ${tier}`;

/** The promise, as parts of [class, figure, words]; `n_kept`: conversations that an earlier server left. */
export function promised(overview, n_kept) {
  const { tokens, requests } = overview;
  if (requests.total === 0) return n_kept ? [["", count(n_kept), stillWarm(n_kept)]] : [["", "", "nothing read yet"]];
  const percent = overview.hit_rate > 0.995 && tokens.read ? 99 : Math.round(100 * overview.hit_rate);
  const saved = overview.seconds_saved;
  return [["", `${percent} %`, "warm"], ["more", count(tokens.reused), "tokens not read"], ...(saved > 0 ? [["saved", duration(1000 * saved), "saved"]] : [])];
}

export const stillWarm = (n) => `${n === 1 ? "conversation" : "conversations"} still warm`;

/** What a reply cost, beside what reading all of it would have cost; `cold_ms` is null where that is not known. */
export function counterfactual(n_cached, n_read, took_ms, cold_ms) {
  const n = n_cached + n_read;
  if (n_cached === 0) return `All ${count(n)} tokens were cold: read in ${duration(took_ms)}`;
  const instead = cold_ms !== null && cold_ms > 1.05 * took_ms ? ` instead of ${duration(cold_ms)}` : "";
  return `${count(n_cached)} of ${count(n)} tokens already warm: ${duration(took_ms)}${instead}`;
}

export const SHORT_REASONS = {
  hit: "everything known", extended: "went on", edited_at: "differs", new: "new", no_checkpoint: "no checkpoint",
  evicted: "evicted", fingerprint: "other model", load_slower_than_compute: "faster to read", refused: "not restorable",
  cache_off: "cache off", deterministic: "deterministic", checkpoints_off: "checkpoints off",
};

const SENTENCES = {
  hit: () => "Everything was known: nothing had to be read.",
  extended: () => "It extends a prompt that is cached. Only what is new was read.",
  edited_at: (c) => `It shares its beginning with something known and differs from token ${count(c.diverged?.at ?? c.n_shared)} on. What changes is best put last.`,
  new: () => "No conversation like it was read before.",
  no_checkpoint: () => "Its tokens are known, but no state was kept near enough. A smaller --checkpoint-every helps.",
  evicted: () => "What was kept of it had been given up for want of room. More --cache-ram or --disk-cache helps.",
  fingerprint: () => "It is on disk, but of another model, build or KV type.",
  load_slower_than_compute: () => "It is on disk, but reading it again was faster than loading it.",
  refused: () => "What was kept of it could not be restored; the server's log says more.",
  cache_off: () => "The request wanted no cache.",
  deterministic: () => "It had to be reproducible, and the cached state was computed beside other requests, so it is not bit-exact.",
  checkpoints_off: () => "Checkpoints are switched off (--max-checkpoints 0).",
};

const sentence = (code, cache) => (SENTENCES[code] ?? (() => `The server says: ${code}.`))(cache);

/** Why a prompt was read, as sentences; `cache` is `timings.cache`. */
export function explained(cache, n_cached, n_read) {
  if (!cache) return [];
  const sentences = [sentence(cache.reason, cache)];
  if (cache.again && cache.again !== cache.reason) sentences.push(`Some of what was known was read again. ${sentence(cache.again, cache)}`);
  if (cache.restored) sentences.push(`It started from the state at token ${count(cache.restored.n_tokens)} (${cache.restored.kind}, ${cache.restored.how}).`);
  const avoidable = Math.max(0, cache.n_shared - n_cached);
  if (n_read) sentences.push(`Of ${count(n_cached + n_read)} tokens ${count(cache.n_shared)} were known, ${count(n_cached)} reused, ${count(avoidable)} read again.`);
  return sentences;
}

/** The message for an error of the server or of the connection. */
export function trouble(error) {
  if (error.status === 0) return "The server cannot be reached.";
  if (error.status === 401) return "The server wants a key.";
  if (error.status === 429) return `The server is busy: ${error.message}.`;
  if (error.code === "exceed_context_size_error") {
    return `This conversation does not fit: it has ${count(error.n_prompt ?? 0)} tokens and the context holds ${count(error.n_ctx ?? 0)}. Branch from an earlier message, or start the server with a larger --ctx-size.`;
  }
  if (error.status === 503) return `The engine is not ready: ${error.message}.`;
  return error.message;
}
