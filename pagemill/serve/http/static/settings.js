// The settings form: sampling parameters and the system prompt. An empty field is left to the server.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"];
const JSONS = { schema: checkSchema, tools: checkTools };
const TEXTS = ["system", "stop-strings", ...Object.keys(JSONS)];
const FIELDS = [...NUMBERS, ...TEXTS];

export class Settings {
  // `changed` is called after every edit.
  constructor(changed) {
    this.form = byId("settings-form");
    this.form.addEventListener("input", () => this.edited(changed));
    this.form.addEventListener("reset", () => setTimeout(() => this.edited(changed)));
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  edited(changed) {
    for (const [name, check] of Object.entries(JSONS)) byId(name).setCustomValidity(problem(byId(name).value, check));
    changed();
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

  // What only a chat has: the form of its answer, and tools.
  chatParams() {
    const params = {};
    const [schema, tools] = ["schema", "tools"].map((name) => byId(name).value.trim());
    if (schema) {
      const json_schema = { name: "answer", schema: JSON.parse(schema), strict: true };
      params.response_format = { type: "json_schema", json_schema };
    }
    if (tools) params.tools = JSON.parse(tools).map((tool) => (tool.function ? tool : { type: "function", function: tool }));
    return params;
  }

  system() {
    return byId("system").value.trim();
  }

  dump() {
    return Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]).filter(([, value]) => value !== ""));
  }

  restore(kept) {
    for (const name of FIELDS) byId(name).value = kept[name] ?? "";
    this.edited(() => {});
  }
}

// What is wrong with the text of a field that takes JSON; "" for nothing.
function problem(text, check) {
  if (!text.trim()) return "";
  try {
    return check(JSON.parse(text));
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

function checkSchema(value) {
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  return isObject ? "" : "A JSON schema is an object";
}

function checkTools(value) {
  const named = (tool) => typeof (tool?.function ?? tool)?.name === "string";
  return Array.isArray(value) && value.every(named) ? "" : "Tools are a list of objects, each with a name";
}
