// The conversations that this browser keeps: a list to search, open, export and delete. Knows nothing about answers.

import { byId, element, show } from "./dom.js";
import { loadChats, saveChats } from "./store.js";

const MAX_TITLE = 60;

// crypto.randomUUID is only there on pages that came over TLS.
const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

const titleOf = (turns) => turns.find((turn) => turn.role === "user")?.content.slice(0, MAX_TITLE) ?? "Empty chat";

const holds = (chat, words) => {
  const text = chat.turns.map((turn) => `${turn.content} ${turn.reasoning ?? ""}`).join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
};

export class History {
  // `app` offers openChat(turns), turns() and say(text). `turns` are those of the conversation that is open.
  constructor(app, current, turns) {
    this.app = app;
    this.chats = loadChats();
    this.current = current && this.chats.some((chat) => chat.id === current) ? current : newId();
    this.keep(turns);
    this.list = byId("history-list");
    byId("history-search").addEventListener("input", () => this.draw());
    byId("export").addEventListener("click", () => this.export());
    byId("toggle-history").addEventListener("click", () => this.open(!this.isOpen()));
    byId("close-history").addEventListener("click", () => this.open(false));
  }

  isOpen() {
    return !byId("history").hidden;
  }

  open(visible) {
    const was = this.isOpen();
    show(byId("history"), visible);
    byId("toggle-history").setAttribute("aria-expanded", String(visible));
    if (visible) {
      this.draw();
      byId("history-search").focus();
    } else if (was) byId("toggle-history").focus();
  }

  // Keep the open conversation as it is now; an empty one is not kept. The newest comes first.
  keep(turns) {
    const at = this.chats.findIndex((chat) => chat.id === this.current);
    if (!turns.length) return;
    const chat = { id: this.current, title: titleOf(turns), turns };
    if (at === -1) this.chats.unshift(chat);
    else this.chats[at] = chat;
    saveChats(this.chats);
  }

  // From here on, what is kept is another conversation; the one before stays as it was.
  begin() {
    this.current = newId();
  }

  export() {
    const turns = this.app.turns();
    const messages = turns.map(({ role, content, reasoning, calls, call_id }) => ({ role, content, reasoning, calls, call_id }));
    const text = JSON.stringify({ title: titleOf(turns), messages }, null, 2);
    const link = element("a", {
      href: URL.createObjectURL(new Blob([text], { type: "application/json" })),
      download: `${titleOf(turns).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.json`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    this.app.say("Exported");
  }

  draw() {
    const words = byId("history-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.chats.filter((chat) => holds(chat, words));
    this.list.replaceChildren(...found.map((chat) => this.entry(chat)));
    byId("history-count").textContent = found.length === 1 ? "1 chat" : `${found.length} chats`;
  }

  entry(chat) {
    const open = element("button", { type: "button", className: "quiet title", textContent: chat.title });
    if (chat.id === this.current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      this.current = chat.id;
      this.open(false);
      this.app.openChat(structuredClone(chat.turns));
    });
    const remove = element("button", { type: "button", className: "quiet", textContent: "Delete", ariaLabel: `Delete ${chat.title}` });
    remove.addEventListener("click", () => this.remove(chat));
    return element("li", {}, open, remove);
  }

  remove(chat) {
    this.chats = this.chats.filter((other) => other !== chat);
    saveChats(this.chats);
    if (chat.id === this.current) {
      this.begin();
      this.app.openChat([]);
    }
    this.draw();
    byId("history-search").focus();
    this.app.say("Deleted");
  }
}
