// Times one answer: time to the first piece, and the rate of the tokens after it.

export class Meter {
  constructor(now = () => performance.now()) {
    this.now = now;
    this.start = now();
    this.first = null;
    this.last = this.start;
    this.pieces = 0;
    this.usage = null;
  }

  saw(text, usage) {
    this.usage = usage ?? this.usage;
    if (!text) return;
    this.last = this.now();
    this.first ??= this.last;
    this.pieces += 1;
  }

  // "24 tokens · 52.1 tokens/s · first token 0.41 s · prompt 31 (16 cached) · 9 of 12 drafts accepted". Without a usage,
  // the pieces are counted instead, which are at most as many as the tokens.
  summary() {
    if (this.first === null) return "";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first token ${((this.first - this.start) / 1000).toFixed(2)} s`);
    if (this.usage) parts.push(promptPart(this.usage));
    const drafts = draftPart(this.usage);
    if (drafts) parts.push(drafts);
    return parts.join(" · ");
  }
}

function draftPart(usage) {
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = usage?.completion_tokens_details ?? {};
  return accepted === undefined ? "" : `${accepted} of ${accepted + rejected} drafts accepted`;
}

function promptPart(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return `prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`;
}
