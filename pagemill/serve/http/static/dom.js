// Small helpers around the document. Text always goes in as text, never as HTML.

export const byId = (id) => document.getElementById(id);

// An element with properties and children; a string child becomes a text node.
export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function show(node, visible) {
  node.hidden = !visible;
}

// Grows a textarea with its text, up to the height that the style sheet allows.
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

// Enter submits the form, Shift+Enter makes a line; Enter that confirms an input method's suggestion does neither.
export function submitOnEnter(area, form) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

// A button that copies text and says so. Pages over plain HTTP have no clipboard API, hence the second way.
export function copyButton(getText, properties = {}) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Copy", ...properties });
  button.addEventListener("click", () => copyFrom(button, getText()));
  return button;
}

export async function copyFrom(button, text) {
  const copied = await copy(text);
  const label = button.textContent;
  button.textContent = copied ? "Copied" : "Cannot copy";
  button.disabled = true;
  setTimeout(() => {
    button.textContent = label;
    button.disabled = false;
  }, 1200);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
