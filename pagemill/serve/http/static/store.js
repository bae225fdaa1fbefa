// What survives a reload. The conversation is kept in localStorage; the API key only as long as the tab is open.

const STATE = "pagemill.playground";
const KEY = "pagemill.key";

const EMPTY = { mode: "chat", turns: [], settings: {}, prompt: "" };

// The kept state; anything unreadable counts as nothing kept.
export function load() {
  try {
    const state = { ...EMPTY, ...JSON.parse(localStorage.getItem(STATE)) };
    return { ...state, turns: state.turns.filter((turn) => typeof turn.content === "string") };
  } catch {
    return { ...EMPTY, turns: [] };
  }
}

export function save(state) {
  try {
    localStorage.setItem(STATE, JSON.stringify(state));
  } catch {
    // Storage is full, or turned off: the conversation then lasts until the page is left.
  }
}

export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // The key then lasts until the page is left.
  }
}
