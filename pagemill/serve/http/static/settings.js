// The settings form: sampling parameters and the system prompt. An empty field is left to the server.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"];
const TEXTS = ["system", "stop-strings"];
const FIELDS = [...NUMBERS, ...TEXTS];

export class Settings {
  // `changed` is called after every edit.
  constructor(changed) {
    this.form = byId("settings-form");
    this.form.addEventListener("input", changed);
    this.form.addEventListener("reset", () => setTimeout(changed));
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Whether every field can be sent; if not, the browser points at the one at fault.
  check() {
    return this.form.reportValidity();
  }

  valid() {
    return this.form.checkValidity();
  }

  // Parameters that were set, under the names of the API.
  params() {
    const set = NUMBERS.filter((name) => byId(name).value !== "");
    const params = Object.fromEntries(set.map((name) => [name, byId(name).valueAsNumber]));
    const stop = byId("stop-strings").value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
    return stop.length ? { ...params, stop } : params;
  }

  system() {
    return byId("system").value.trim();
  }

  dump() {
    return Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]).filter(([, value]) => value !== ""));
  }

  restore(kept) {
    for (const name of FIELDS) byId(name).value = kept[name] ?? "";
  }
}
