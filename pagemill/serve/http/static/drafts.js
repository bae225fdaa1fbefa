// Marks text that came by accepted drafts (speculative decoding), over the nodes that are there. Browsers without
// highlights (CSS Custom Highlight API) show it unmarked.

const highlight = globalThis.Highlight && CSS.highlights ? new Highlight() : null;
if (highlight) CSS.highlights.set("draft", highlight);
const marked = new WeakMap();

export const canMark = highlight !== null;

// Which pieces of an answer are of steps that accepted drafts. The server counts them in the usage of every chunk.
export class DraftCount {
  constructor() {
    this.tokens = 0;
    this.accepted = 0;
    this.drafted = false;
  }

  // Whether a chunk with this usage is of such a step; several chunks may be of one.
  saw(usage) {
    if (!usage || usage.completion_tokens === this.tokens) return this.drafted;
    const accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
    this.drafted = accepted > this.accepted;
    this.tokens = usage.completion_tokens;
    this.accepted = accepted;
    return this.drafted;
  }
}

// Adds the place of a piece to those that are there: [start, end) pairs, ascending.
export function addSpan(spans, start, end) {
  const last = spans.at(-1);
  if (last?.[1] === start) last[1] = end;
  else spans.push([start, end]);
}

// Marks those places of `source` in the nodes of `container`, which show it: all of it, or what is left of Markdown.
export function markSpans(container, source, spans) {
  if (!highlight) return;
  for (const range of marked.get(container) ?? []) highlight.delete(range);
  const ranges = spans?.length ? [...rangesOf(container, source, spans)] : [];
  for (const range of ranges) highlight.add(range);
  marked.set(container, ranges);
}

// Forgets all places, of nodes that are about to go.
export function forgetMarks() {
  highlight?.clear();
}

// What a page shows of a text has its characters in their order, with some of them left out.
function* rangesOf(container, source, spans) {
  const skips = (node) => node.nodeType === Node.ELEMENT_NODE && node.classList.contains("code-head");
  const filter = (node) => (skips(node) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const nodes = document.createTreeWalker(container, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT, filter);
  let at = 0;
  let next = 0;
  while (nodes.nextNode()) {
    const node = nodes.currentNode;
    if (node.nodeType !== Node.TEXT_NODE) continue;
    let start = null;
    for (let place = 0; place < node.data.length; place += 1) {
      at = source.indexOf(node.data[place], at);
      if (at < 0) return;
      while (next < spans.length && spans[next][1] <= at) next += 1;
      const inside = next < spans.length && spans[next][0] <= at;
      if (inside) start ??= place;
      else if (start !== null) {
        yield rangeIn(node, start, place);
        start = null;
      }
      at += 1;
    }
    if (start !== null) yield rangeIn(node, start, node.data.length);
  }
}

function rangeIn(node, start, end) {
  const range = new Range();
  range.setStart(node, start);
  range.setEnd(node, end);
  return range;
}
