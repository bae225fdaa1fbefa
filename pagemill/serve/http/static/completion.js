// The completion: a text, and what the model makes of it.

import { streamChunks } from "./api.js";
import { byId, copyFrom, show, submitOnEnter } from "./dom.js";
import { addSpan, canMark, DraftCount, markSpans } from "./drafts.js";
import { Meter } from "./meter.js";

const DEFAULT_MAX_TOKENS = 128;

export class Completion {
  // `app` offers settings, model(), ready(), failed(error) and changed().
  constructor(app, prompt) {
    this.app = app;
    this.running = null;
    this.text = "";
    this.input = byId("prompt");
    this.input.value = prompt;
    const form = byId("completion-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    submitOnEnter(this.input, form);
    this.input.addEventListener("input", () => app.changed());
    byId("completion-stop").addEventListener("click", () => this.stop());
    byId("adopt").addEventListener("click", () => this.adopt());
    byId("completion-copy").addEventListener("click", (event) => copyFrom(event.target, this.text));
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.input.value = "";
    this.reset("");
    this.app.changed();
    this.input.focus();
  }

  // The output becomes the text to continue.
  adopt() {
    this.input.value += this.text;
    this.reset("");
    this.app.changed();
    this.input.focus();
  }

  async run() {
    if (this.running || !this.app.ready()) return;
    if (!this.input.value) {
      this.input.focus();
      return;
    }
    const prompt = this.input.value;
    this.reset(prompt);
    this.setRunning(new AbortController());
    try {
      await this.receive({ model: this.app.model(), prompt, max_tokens: DEFAULT_MAX_TOKENS, ...this.app.settings.params() });
    } catch (error) {
      if (error.name === "AbortError") byId("completion-stats").textContent += " · stopped";
      else this.fail(error.message);
      this.app.failed(error);
    }
    this.setRunning(null);
  }

  async receive(body) {
    const meter = new Meter();
    const drafts = new DraftCount();
    const spans = [];
    const output = byId("completion-text");
    show(byId("completion-output"), true);
    for await (const chunk of streamChunks("v1/completions", body, this.running.signal)) {
      const text = chunk.choices?.[0]?.text ?? "";
      meter.saw(text, chunk.usage);
      if (drafts.saw(chunk.usage) && text) addSpan(spans, this.text.length, this.text.length + text.length);
      this.text += text;
      output.append(text);
      markSpans(output, this.text, spans);
      show(byId("completion-legend"), canMark && spans.length > 0);
      byId("completion-stats").textContent = meter.summary();
    }
  }

  fail(message) {
    byId("completion-error").textContent = message;
    show(byId("completion-error"), true);
    show(byId("completion-output"), this.text !== "");
  }

  reset(prompt) {
    this.text = "";
    byId("completion-prompt").textContent = prompt;
    byId("completion-text").textContent = "";
    byId("completion-stats").textContent = "";
    for (const id of ["completion-error", "completion-output", "completion-legend", "adopt", "completion-copy"]) show(byId(id), false);
  }

  setRunning(controller) {
    this.running = controller;
    const busy = controller !== null;
    show(byId("complete"), !busy);
    show(byId("completion-stop"), busy);
    show(byId("adopt"), !busy && this.text !== "");
    show(byId("completion-copy"), !busy && this.text !== "");
    byId("completion-output").setAttribute("aria-busy", String(busy));
  }
}
