// What survives a reload. Conversations are kept in localStorage; the API key only as long as the tab is open.

const STATE = "pagemill.playground";
const CHATS = "pagemill.chats";
const KEY = "pagemill.key";
const MAX_CHATS = 200;

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

// Conversations, the newest first.
export function loadChats() {
  try {
    const chats = JSON.parse(localStorage.getItem(CHATS)) ?? [];
    return chats.filter((chat) => typeof chat.id === "string" && Array.isArray(chat.turns));
  } catch {
    return [];
  }
}

// Where there is no room for all of them, the oldest are forgotten.
export function saveChats(chats) {
  chats.splice(MAX_CHATS);
  while (chats.length) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(chats));
      return;
    } catch {
      chats.pop();
    }
  }
  try {
    localStorage.removeItem(CHATS);
  } catch {
    // Storage is turned off.
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
