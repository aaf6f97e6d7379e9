// Requests to the server of this page. The key stays in this tab's session.

const KEY = "holdfast-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

/** The server's refusal; `status` 0: it does not answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response to a request. Throws an ApiError for any status but 2xx. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (options.body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(response.status, told?.error?.message ?? `status ${response.status}`);
}

/** The chunks of a streamed chat completion. Throws an ApiError for an error in the stream, and for one cut off. */
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "the answer was cut off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error.message);
      yield chunk;
    }
  }
}
