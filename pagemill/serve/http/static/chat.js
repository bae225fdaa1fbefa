// The chat: a conversation as a list of turns, the newest of which may still be growing.

import { streamChunks } from "./api.js";
import { byId, copyButton, element, fitHeight, show, submitOnEnter } from "./dom.js";
import { renderInto } from "./markdown.js";
import { Meter } from "./meter.js";

const SUGGESTIONS = [
  "Write one sentence about the ocean.",
  "Explain what a paper mill does, in two sentences.",
  "List three uses for an old newspaper.",
];
const NEAR_BOTTOM_PX = 80;

export class Chat {
  // `app` offers settings, model(), ready(), failed(error) and changed(). A turn is { role, content, stats?, error?, stopped? }.
  constructor(app, turns) {
    this.app = app;
    this.turns = turns;
    // The page was left while the model was about to answer.
    if (turns.at(-1)?.role === "user") turns.push({ role: "assistant", content: "", stopped: true });
    this.running = null;
    this.log = byId("log");
    this.input = byId("message");
    this.form = byId("chat-form");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.input.value);
    });
    submitOnEnter(this.input, this.form);
    this.input.addEventListener("input", () => fitHeight(this.input));
    byId("stop").addEventListener("click", () => this.stop());
    this.draw();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.app.changed();
    this.draw();
    this.input.focus();
  }

  send(text) {
    if (this.running || !text.trim() || !this.app.ready()) return;
    this.input.value = "";
    fitHeight(this.input);
    this.turns.push({ role: "user", content: text.trim() });
    this.answer();
  }

  regenerate() {
    if (this.running || !this.app.ready()) return;
    this.turns.pop();
    this.answer();
  }

  // The conversation as it is sent. A question whose answer failed is left out with it.
  messages() {
    const system = this.app.settings.system();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "assistant" && !turn.content) messages.pop();
      else messages.push({ role: turn.role, content: turn.content });
    }
    return messages;
  }

  async answer() {
    const body = { model: this.app.model(), messages: this.messages(), ...this.app.settings.params() };
    const turn = { role: "assistant", content: "" };
    this.app.changed();
    this.turns.push(turn);
    this.setRunning(new AbortController());
    this.draw();
    this.scrollToEnd();
    try {
      await this.receive(turn, body);
    } catch (error) {
      if (error.name === "AbortError") turn.stopped = true;
      else turn.error = error.message;
      this.app.failed(error);
    }
    this.setRunning(null);
    this.app.changed();
    this.draw();
  }

  // Fills the turn, drawing at most once a frame.
  async receive(turn, body) {
    const meter = new Meter();
    let frame = 0;
    const drawSoon = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        this.drawGrowing(turn);
      });
    };
    try {
      for await (const chunk of streamChunks("v1/chat/completions", body, this.running.signal)) {
        const text = chunk.choices?.[0]?.delta?.content ?? "";
        meter.saw(text, chunk.usage);
        turn.content += text;
        turn.finish = chunk.choices?.[0]?.finish_reason ?? turn.finish;
        turn.stats = meter.summary();
        drawSoon();
      }
    } finally {
      cancelAnimationFrame(frame);
    }
  }

  setRunning(controller) {
    this.running = controller;
    const busy = controller !== null;
    const focused = document.activeElement === byId(busy ? "send" : "stop");
    show(byId("send"), !busy);
    show(byId("stop"), busy);
    if (focused) byId(busy ? "stop" : "send").focus();
    this.log.setAttribute("aria-busy", String(busy));
  }

  draw() {
    const atEnd = this.isAtEnd();
    this.log.replaceChildren(...this.turns.map((turn, index) => this.turnNode(turn, index === this.turns.length - 1)));
    if (!this.turns.length) this.log.append(this.welcome());
    if (atEnd) this.scrollToEnd();
  }

  drawGrowing(turn) {
    const atEnd = this.isAtEnd();
    const node = this.log.lastElementChild;
    node.classList.remove("waiting");
    renderInto(node.querySelector(".text"), turn.content);
    node.querySelector(".stats").textContent = turn.stats;
    if (atEnd) this.scrollToEnd();
  }

  turnNode(turn, last) {
    const text = element("div", { className: "text" });
    const node = element("article", { className: `turn ${turn.role}`, ariaLabel: turn.role === "user" ? "You" : "Model" }, text);
    if (turn.role === "user") {
      text.textContent = turn.content;
      return node;
    }
    const growing = last && this.running !== null;
    renderInto(text, turn.content);
    if (growing && !turn.content) node.classList.add("waiting");
    if (turn.error) node.append(element("p", { className: "error", role: "alert", textContent: turn.error }));
    node.append(this.foot(turn, last && !growing));
    return node;
  }

  foot(turn, regenerable) {
    const notes = [turn.stats, turn.stopped && "stopped", turn.finish === "length" && "length limit"];
    const foot = element("footer", {}, element("p", { className: "stats", textContent: notes.filter(Boolean).join(" · ") }));
    const buttons = element("div", { className: "actions" });
    if (turn.content) buttons.append(copyButton(() => turn.content));
    if (regenerable) {
      const again = element("button", { type: "button", className: "quiet", textContent: turn.error ? "Retry" : "Regenerate" });
      again.addEventListener("click", () => this.regenerate());
      buttons.append(again);
    }
    foot.append(buttons);
    return foot;
  }

  welcome() {
    const node = element("div", { className: "welcome" }, element("h2", { textContent: "What shall we write?" }));
    const list = element("div", { className: "suggestions" });
    for (const text of SUGGESTIONS) {
      const button = element("button", { type: "button", textContent: text });
      button.addEventListener("click", () => this.send(text));
      list.append(button);
    }
    node.append(list);
    return node;
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_BOTTOM_PX;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
