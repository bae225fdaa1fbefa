// Markdown as DOM nodes: code blocks, headings, lists, quotes, rules, and inline code, bold, italics and links.
// Text of the model only ever becomes text nodes, so it cannot bring elements or attributes of its own.

import { copyButton, element } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?/;
const INLINE = /`([^`\n]+)`|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])([^*\n]+?)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/s;

// Makes `container` show the text. Blocks that did not change keep their nodes, so that a growing answer stays
// cheap and a selection in it is kept.
export function renderInto(container, text) {
  const blocks = splitBlocks(text);
  blocks.forEach((block, index) => {
    const old = container.children[index];
    if (old?.source === block.source) return;
    const node = renderBlock(block);
    node.source = block.source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

// The text as blocks: { kind, lines, source }. `open` is the block that the next line may still belong to.
export function splitBlocks(text) {
  const blocks = [];
  let open = null;
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (closes(open, line)) open = null;
      else open.lines.push(line);
    } else if (!line.trim()) {
      if (open?.kind === "list") open.blank = true;
      else open = null;
    } else {
      const block = startOf(line);
      if (continues(open, block, line)) {
        open.lines.push(line);
        open.blank = false;
      } else {
        blocks.push(block);
        open = block.kind === "heading" || block.kind === "rule" ? null : block;
      }
    }
  }
  for (const block of blocks) block.source = `${block.kind}\0${block.language ?? ""}\0${block.lines.join("\n")}`;
  return blocks;
}

// The block that a line would begin.
function startOf(line) {
  const fence = FENCE.exec(line);
  if (fence) return { kind: "code", lines: [], fence: fence[1], language: fence[2] };
  if (RULE.test(line)) return { kind: "rule", lines: [line] };
  if (HEADING.test(line)) return { kind: "heading", lines: [line] };
  if (ITEM.test(line)) return { kind: "list", lines: [line] };
  if (QUOTE.test(line)) return { kind: "quote", lines: [line] };
  return { kind: "text", lines: [line] };
}

function continues(open, block, line) {
  if (open?.kind === "list" && block.kind === "text") return !open.blank || /^\s/.test(line);
  if (open?.kind === "list" && block.kind === "list") return sameList(open, line);
  return open?.kind === block.kind && (block.kind === "text" || block.kind === "quote");
}

function closes(code, line) {
  const mark = line.trim();
  return mark.startsWith(code.fence) && mark === mark[0].repeat(mark.length);
}

function sameList(list, line) {
  const ordered = (text) => /\d/.test(ITEM.exec(text)[2]);
  return /^\s/.test(line) || ordered(list.lines[0]) === ordered(line);
}

const RENDERERS = {
  code: renderCode,
  heading: ({ lines }) => {
    const [, marks, title] = HEADING.exec(lines[0]);
    return inlineInto(element(`h${Math.min(6, marks.length + 2)}`), title);
  },
  list: ({ lines }) => renderList(lines),
  quote: ({ lines }) => {
    const node = element("blockquote");
    renderInto(node, lines.map((line) => line.replace(QUOTE, "")).join("\n"));
    return node;
  },
  rule: () => element("hr"),
  text: ({ lines }) => inlineInto(element("p"), lines.join("\n")),
};

function renderBlock(block) {
  return RENDERERS[block.kind](block);
}

function renderCode({ lines, language }) {
  const text = lines.join("\n");
  const head = element("div", { className: "code-head" }, element("span", { textContent: language || "code" }));
  head.append(copyButton(() => text));
  return element("div", { className: "code" }, head, element("pre", {}, element("code", { textContent: text })));
}

// A list, with lists nested by indentation; other lines belong to the item before them.
function renderList(lines) {
  const root = { node: listFor(lines[0]), indent: indentOf(lines[0]) };
  const stack = [root];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      inlineInto(stack.at(-1).node.lastElementChild, `\n${line.trim()}`);
      continue;
    }
    const indent = item[1].length;
    while (stack.length > 1 && indent < stack.at(-1).indent) stack.pop();
    if (indent > stack.at(-1).indent + 1) {
      const nested = { node: listFor(line), indent };
      stack.at(-1).node.lastElementChild.append(nested.node);
      stack.push(nested);
    }
    stack.at(-1).node.append(inlineInto(element("li"), item[3]));
  }
  return root.node;
}

function listFor(line) {
  const number = parseInt(ITEM.exec(line)[2], 10);
  return Number.isNaN(number) ? element("ul") : element("ol", { start: number });
}

function indentOf(line) {
  return ITEM.exec(line)[1].length;
}

// Appends text with its inline marks to a node, and returns the node.
function inlineInto(node, text) {
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    node.append(rest.slice(0, match.index), inlineNode(match));
    rest = rest.slice(match.index + match[0].length);
  }
  node.append(rest);
  return node;
}

function inlineNode([, code, bold, italic, label, address]) {
  if (code !== undefined) return element("code", { textContent: code });
  if (bold !== undefined) return inlineInto(element("strong"), bold);
  if (italic !== undefined) return inlineInto(element("em"), italic);
  return element("a", { href: address, title: address, rel: "noopener noreferrer", target: "_blank", textContent: label });
}
