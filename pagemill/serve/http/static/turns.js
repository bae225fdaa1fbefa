// How a turn of a conversation looks: text, reasoning, tool calls and their results, and what can be done with it.

import { byId, copyButton, element } from "./dom.js";
import { canMark, markSpans } from "./drafts.js";
import { renderInto } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

const button = (textContent, act, label = textContent) => {
  const node = element("button", { type: "button", className: "quiet", textContent, ariaLabel: label });
  node.addEventListener("click", act);
  return node;
};

// `acts` offers regenerate(), edit(index, text), branch(index) and result(index, call, text); `place` says whether the
// turn is the last one, whether it still grows, and whether another one does.
export function turnNode(turn, index, place, acts) {
  const text = element("div", { className: "text" });
  const node = element("article", { className: `turn ${turn.role}`, ariaLabel: NAMES[turn.role] });
  if (turn.role !== "assistant") {
    text.textContent = turn.content;
    node.append(text);
    if (turn.role === "user" && !place.busy) node.append(editButton(node, turn, index, acts));
    return node;
  }
  node.append(element("div", { className: "before" }), text, element("div", { className: "calls" }));
  fill(node, turn, place.growing);
  if (place.last && !place.busy) node.querySelector(".calls").append(...(turn.calls ?? []).map((call) => resultForm(call, index, acts)));
  if (turn.error) node.append(element("p", { className: "error", role: "alert", textContent: turn.error }));
  node.append(foot(turn, index, place, acts));
  return node;
}

// Everything of an answer that may grow.
export function fill(node, turn, growing) {
  const empty = !turn.content && !turn.reasoning && !turn.calls?.length;
  node.classList.toggle("waiting", growing && empty);
  const text = node.querySelector(".text");
  renderInto(text, turn.content);
  markSpans(text, turn.content, turn.drafts);
  fillReasoning(node.querySelector(".before"), turn, growing);
  const calls = (turn.calls ?? []).map(callNode);
  node.querySelector(".calls").replaceChildren(...calls);
}

function fillReasoning(place, turn, growing) {
  if (!turn.reasoning) return;
  let details = place.querySelector("details");
  if (!details) {
    details = element("details", { className: "reasoning", open: growing }, element("summary", { textContent: "Reasoning" }));
    details.append(element("div", { className: "thoughts" }));
    place.append(details);
  }
  details.querySelector(".thoughts").textContent = turn.reasoning;
  if (growing && turn.content) details.open = false;
}

function callNode(call) {
  const node = element("section", { className: "call", ariaLabel: `Call of ${call.name}` });
  node.append(element("h3", { textContent: call.name }), element("pre", { tabIndex: 0 }, element("code", { textContent: pretty(call.arguments) })));
  return node;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet
  }
}

function resultForm(call, index, acts) {
  const area = element("textarea", { rows: 2, ariaLabel: `Result of ${call.name}`, placeholder: `Result of ${call.name}` });
  const form = element("form", { className: "result" }, area, element("button", { type: "submit", textContent: "Send result" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    acts.result(index, call, area.value);
  });
  return form;
}

function editButton(node, turn, index, acts) {
  return button("Edit", () => {
    const area = element("textarea", { rows: 3, value: turn.content, ariaLabel: "Edit message" });
    const form = element("form", { className: "edit" }, area);
    const cancel = button("Cancel", () => acts.redraw(index));
    form.append(element("button", { type: "submit", textContent: "Send edited" }), cancel);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) acts.edit(index, area.value.trim());
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      acts.redraw(index);
    });
    node.replaceChildren(form);
    area.focus();
  }, "Edit message");
}

function foot(turn, index, place, acts) {
  const notes = [turn.stats, turn.stopped && "stopped", turn.finish === "length" && "length limit"];
  const stats = element("p", { className: "stats", textContent: notes.filter(Boolean).join(" · ") });
  const actions = element("div", { className: "actions" });
  if (turn.content) actions.append(copyButton(() => turn.content));
  if (!place.busy) actions.append(button("Branch", () => acts.branch(index + 1), "Branch from here"));
  if (place.last && !place.busy) actions.append(button(turn.error ? "Retry" : "Regenerate", () => acts.regenerate()));
  return element("footer", {}, stats, ...legend(turn), actions);
}

function legend(turn) {
  return canMark && turn.drafts?.length ? [element("p", { className: "stats legend", textContent: "Came by accepted drafts" })] : [];
}

// Words for a screen reader, which does not see what changed.
export function say(text) {
  byId("status").textContent = text;
}
