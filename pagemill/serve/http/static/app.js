// The page: joins chat, completion and settings, and keeps an eye on the connection to the server.

import { modelName, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { byId, fitHeight, show } from "./dom.js";
import { History } from "./history.js";
import { Settings } from "./settings.js";
import { load, save } from "./store.js";
import { say } from "./turns.js";

const MODES = ["chat", "completion"];

class App {
  constructor() {
    const kept = load();
    this.name = "";
    this.mode = "chat";
    this.settings = new Settings(() => this.changed());
    this.settings.restore(kept.settings);
    this.history = new History(this, kept.chat, kept.turns);
    this.chat = new Chat(this, kept.turns);
    this.completion = new Completion(this, kept.prompt);
    this.bind();
    this.setMode(MODES.includes(kept.mode) ? kept.mode : "chat");
    this.connect();
  }

  bind() {
    for (const mode of MODES) byId(`tab-${mode}`).addEventListener("click", () => this.setMode(mode));
    document.querySelector("[role=tablist]").addEventListener("keydown", (event) => this.moveTab(event));
    byId("clear").addEventListener("click", () => this[this.mode].clear());
    byId("reconnect").addEventListener("click", () => this.connect());
    byId("toggle-settings").addEventListener("click", () => this.openSettings(!this.settingsOpen()));
    byId("close-settings").addEventListener("click", () => {
      this.openSettings(false);
      byId("toggle-settings").focus();
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(byId("key").value);
      this.connect();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this[this.mode].running) this[this.mode].stop();
      else if (this.history.isOpen()) this.history.open(false);
      else this.openSettings(false);
    });
  }

  openChat(turns) {
    this.chat.turns = turns; // before anything keeps those of another conversation under its name
    this.setMode("chat");
    this.chat.open(turns);
  }

  turns() {
    return this.chat.turns;
  }

  // The conversation becomes another one.
  branched() {
    this.history.begin();
  }

  say(text) {
    say(text);
  }

  // Asks the server for its model, and says so when that fails.
  async connect() {
    byId("model").dataset.state = "waiting";
    try {
      this.name = await modelName();
      byId("model").dataset.state = "ready";
      byId("model-name").textContent = this.name;
      document.title = `${this.name} - pagemill playground`;
      show(byId("notice"), false);
    } catch (error) {
      this.failed(error);
    }
  }

  // What an error means for the page as a whole; what it means for an answer is shown there.
  failed(error) {
    if (error.name === "AbortError" || (error.status !== 0 && error.status !== 401)) return;
    const locked = error.status === 401;
    byId("model").dataset.state = "failed";
    byId("model-name").textContent = locked ? "locked" : "not connected";
    byId("notice-text").textContent = locked ? "This server asks for an API key." : error.message;
    show(byId("key-form"), locked);
    show(byId("reconnect"), !locked);
    show(byId("notice"), true);
    if (locked) byId("key").focus();
  }

  // undefined leaves the choice to the server.
  model() {
    return this.name || undefined;
  }

  // Whether a request may be sent with the settings as they are; opens them when not.
  ready() {
    if (this.settings.valid()) return true;
    this.openSettings(true);
    return this.settings.check();
  }

  changed() {
    this.history.keep(this.chat.turns);
    save({
      mode: this.mode,
      turns: this.chat.turns,
      chat: this.history.current,
      settings: this.settings.dump(),
      prompt: this.completion.input.value,
    });
  }

  setMode(mode) {
    this.mode = mode;
    for (const each of MODES) {
      const chosen = each === mode;
      show(byId(each), chosen);
      byId(`tab-${each}`).setAttribute("aria-selected", String(chosen));
      byId(`tab-${each}`).tabIndex = chosen ? 0 : -1;
    }
    byId("clear").textContent = mode === "chat" ? "New chat" : "Clear";
    byId("max_tokens").placeholder = mode === "chat" ? "all that fit" : "128";
    if (mode === "chat") this.chat.scrollToEnd();
    fitHeight(byId("message"));
    this.changed();
  }

  moveTab(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = MODES.find((mode) => mode !== this.mode);
    this.setMode(other);
    byId(`tab-${other}`).focus();
  }

  settingsOpen() {
    return byId("settings").dataset.open === "true";
  }

  openSettings(open) {
    byId("settings").dataset.open = String(open);
    byId("toggle-settings").setAttribute("aria-expanded", String(open));
    if (open) byId("system").focus();
  }
}

new App();
