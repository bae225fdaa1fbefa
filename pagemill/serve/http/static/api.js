// The server's API: which model there is, and answers as a stream of chunks. Knows nothing about the page.

import { loadKey, saveKey } from "./store.js";

let key = loadKey();

export function useKey(value) {
  key = value;
  saveKey(value);
}

// An answer other than 200, or an error inside a stream. `status` is 0 when there was no answer at all.
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The id of the first model that the server offers.
export async function modelName() {
  const answer = await request("v1/models", { headers: headers() });
  const name = (await answer.json()).data?.[0]?.id;
  if (!name) throw new ApiError("The server offers no model.", 200);
  return name;
}

// Chunks of a streamed answer, as objects, until the server says [DONE]. Aborting the signal ends the request.
export async function* streamChunks(path, body, signal) {
  const answer = await request(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  for await (const data of eventData(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), 200);
    yield chunk;
  }
  throw new ApiError("The server broke off its answer.", 0);
}

// The data of each server-sent event, however the bytes are cut.
export async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (pending + value).split("\n");
    pending = lines.pop();
    for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", 0);
  }
  if (!answer.ok) throw new ApiError(await refusal(answer), answer.status);
  return answer;
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.detail ?? text;
  } catch {
    return text || `${answer.status} ${answer.statusText}`;
  }
}
