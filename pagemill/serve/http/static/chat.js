// The chat: a conversation as a list of turns, the newest of which may still be growing.

import { streamChunks } from "./api.js";
import { byId, element, fitHeight, show, submitOnEnter } from "./dom.js";
import { addSpan, DraftCount, forgetMarks } from "./drafts.js";
import { Meter } from "./meter.js";
import { fill, say, turnNode } from "./turns.js";

const SUGGESTIONS = [
  "Write one sentence about the ocean.",
  "Explain what a paper mill does, in two sentences.",
  "List three uses for an old newspaper.",
];
const NEAR_BOTTOM_PX = 80;

export class Chat {
  // `app` offers settings, model(), ready(), failed(error), changed() and branched(). A turn is { role, content,
  // reasoning?, calls?, call_id?, stats?, drafts?, error?, stopped? }; a call is { id, name, arguments }; drafts are
  // places in the content.
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
    this.app.branched();
    this.open([]);
  }

  // Show another conversation.
  open(turns) {
    this.stop();
    this.turns = turns;
    this.app.changed();
    this.draw();
    this.input.focus();
  }

  // Another conversation, with the turns before `index`; the present one stays in the history.
  branch(index) {
    if (this.running) return;
    this.app.branched();
    this.open(structuredClone(this.turns.slice(0, index)));
    say("A branch of the chat");
  }

  edit(index, text) {
    if (this.running || !this.app.ready()) return;
    this.branch(index);
    this.send(text);
  }

  // What a tool answered to a call of the last turn; asked for more once each call has its result.
  result(index, call, text) {
    if (this.running || !this.app.ready()) return;
    this.turns.push({ role: "tool", content: text, call_id: call.id });
    const answered = new Set(this.turns.slice(index + 1).map((turn) => turn.call_id));
    if (this.turns[index].calls.every((one) => answered.has(one.id))) this.answer();
    else this.draw();
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
    this.turns.splice(this.turns.findLastIndex((turn) => turn.role === "assistant"));
    this.answer();
  }

  // The conversation as it is sent. A question whose answer failed is left out with it.
  messages() {
    const system = this.app.settings.system();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "assistant" && !turn.content && !turn.calls?.length) messages.pop();
      else messages.push(message(turn));
    }
    return messages;
  }

  async answer() {
    const body = { model: this.app.model(), messages: this.messages(), ...this.app.settings.params(), ...this.app.settings.chatParams() };
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
    say(turn.stopped ? "Stopped" : turn.error ? "The answer failed" : "The answer is complete");
  }

  // Fills the turn, drawing at most once a frame.
  async receive(turn, body) {
    const meter = new Meter();
    const drafts = new DraftCount();
    let frame = 0;
    const drawSoon = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        this.drawGrowing(turn);
      });
    };
    try {
      for await (const chunk of streamChunks("v1/chat/completions", body, this.running.signal)) {
        const delta = chunk.choices?.[0]?.delta ?? {};
        const text = delta.content ?? "";
        meter.saw(text || delta.reasoning || (delta.tool_calls ? " " : ""), chunk.usage);
        if (drafts.saw(chunk.usage) && text) addSpan((turn.drafts ??= []), turn.content.length, turn.content.length + text.length);
        turn.content += text;
        if (delta.reasoning) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning;
        for (const part of delta.tool_calls ?? []) addCall(turn, part);
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
    const end = this.turns.findLastIndex((turn) => turn.role !== "tool");
    const busy = this.running !== null;
    forgetMarks();
    this.log.replaceChildren(
      ...this.turns.map((turn, index) => turnNode(turn, index, { last: index === end, busy, growing: busy && index === end }, this)),
    );
    if (!this.turns.length) this.log.append(this.welcome());
    if (atEnd) this.scrollToEnd();
  }

  drawGrowing(turn) {
    const atEnd = this.isAtEnd();
    const node = this.log.lastElementChild;
    fill(node, turn, true);
    node.querySelector(".stats").textContent = turn.stats;
    if (atEnd) this.scrollToEnd();
  }

  // Draw once more, and go on where the turn is.
  redraw(index) {
    this.draw();
    this.log.children[index]?.querySelector("button")?.focus();
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

// A turn as the API takes it.
function message(turn) {
  if (turn.role === "tool") return { role: "tool", content: turn.content, tool_call_id: turn.call_id };
  if (!turn.calls?.length) return { role: turn.role, content: turn.content };
  const calls = turn.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: turn.role, content: turn.content, tool_calls: calls };
}

// The first part of a call has its id and name, the others more of its arguments.
function addCall(turn, part) {
  turn.calls ??= [];
  const call = (turn.calls[part.index ?? 0] ??= { id: part.id, name: part.function?.name ?? "", arguments: "" });
  call.arguments += part.function?.arguments ?? "";
}
