// The Try it view: a conversation with tools whose results the visitor types.

import { ApiError, ask, chunks } from "./api.js";
import { $, duration, el } from "./dom.js";

const EXAMPLE = {
  name: "get_weather",
  description: "Current weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

export class Chat {
  #messages = [];
  #before = 0; // messages before the user's last one: they stay when its answer fails
  #tools = []; // cards
  #program = "";
  #stop = null; // of the answer that comes now
  #show; // shows a program in the timeline

  constructor(show) {
    this.#show = show;
    this.#addTool(EXAMPLE);
    $("add").onclick = () => this.#addTool({ name: "", description: "", parameters: { type: "object", properties: {} } }).focus();
    $("say").onsubmit = (event) => { event.preventDefault(); this.#say(); };
    $("words").onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.#say(); }
    };
    $("anew").onclick = () => this.#anew();
    this.#anew();
  }

  /** Which models there are, asked once the server lets us in. */
  async models() {
    if ($("model").options.length) return;
    const told = await (await ask("v1/models")).json();
    $("model").replaceChildren(...told.data.map((each) => el("option", {}, each.id)));
  }

  #anew() {
    this.#stop?.abort();
    if (this.#messages.length) ask(`v1/programs/${this.#program}`, { method: "DELETE" }).catch(() => {}); // nobody comes back for it
    this.#messages = [];
    this.#program = `page-${Math.random().toString(36).slice(2, 8)}`;
    $("log").replaceChildren();
    this.#free();
  }

  #free() {
    this.#stop = null;
    $("send").textContent = "Send";
    $("send").disabled = false;
  }

  /** Take the last message and its answer out of the conversation: no call may stand without its result. */
  #forget() {
    this.#messages.length = this.#before;
    this.#free();
  }

  async #say() {
    if (this.#stop) return this.#stop.abort();
    const text = $("words").value.trim() || (this.#messages.length ? "" : $("words").placeholder);
    if (!text || $("send").disabled) return;
    $("words").value = "";
    this.#before = this.#messages.length;
    this.#messages.push({ role: "user", content: text });
    $("log").append(el("li", { className: "user" }, el("p", {}, text)));
    await this.#turn();
  }

  /** One turn, and those after it as long as it calls tools. */
  async #turn() {
    const tools = this.#declared();
    if (!tools) return this.#forget();
    const item = $("log").appendChild(el("li", { className: "assistant" }));
    const reply = new Reply(item);
    this.#stop = new AbortController();
    $("send").textContent = "Stop";
    const body = {
      model: $("model").value, messages: this.#messages, program_id: this.#program, stream: true,
      stream_options: { include_usage: true }, temperature: Number($("temperature").value), max_tokens: Number($("most").value),
      ...(tools.length ? { tools } : {}),
    };
    try {
      await this.models();
      body.model = $("model").value;
      const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: this.#stop.signal });
      reply.served(response.headers);
      for await (const chunk of chunks(response)) reply.take(chunk);
      item.append(el("small", {}, reply.summary, " · ", el("a", { href: "#live", onclick: () => this.#show(this.#program) }, "in the timeline")));
    } catch (error) {
      item.append(el("p", { className: "error" }, error.name === "AbortError" ? "stopped" : error.message));
      if (!(error instanceof ApiError) && error.name !== "AbortError") console.error(error);
      return this.#forget();
    }
    const calls = reply.ended();
    this.#messages.push(reply.message);
    if (!calls.length) return this.#free();
    this.#stop = null;
    $("send").textContent = "Send";
    $("send").disabled = true; // until its tools have answered
    const program = this.#program;
    const results = await Promise.all(calls.map((call) => call.answered));
    if (program !== this.#program) return;
    calls.forEach((call, index) => this.#messages.push({ role: "tool", tool_call_id: call.id, content: results[index] }));
    await this.#turn();
  }

  // ---- tools ----

  #addTool({ name, description, parameters }) {
    const card = {
      name: el("input", { value: name, placeholder: "name", ariaLabel: "Name", spellcheck: false }),
      description: el("input", { value: description, placeholder: "what it does", ariaLabel: "Description" }),
      parameters: el("textarea", { rows: 10, value: JSON.stringify(parameters, null, 1).replace(/\{\s+("type": "string")\s+\}/g, "{ $1 }"), ariaLabel: "Parameters, a JSON schema", spellcheck: false }),
      error: el("span", { className: "error" }),
    };
    const remove = () => { this.#tools.splice(this.#tools.indexOf(card), 1); box.remove(); };
    const box = el("div", { className: "tool" }, card.name, card.description, card.parameters, card.error, el("button", { className: "quiet", onclick: remove }, "Remove"));
    this.#tools.push(card);
    $("tools").append(box);
    return card.name;
  }

  /** The tools as the API wants them; null where one is not right, which is said beside it. */
  #declared() {
    let right = true;
    const told = this.#tools.filter((card) => card.name.value.trim()).map((card) => {
      card.error.textContent = "";
      try {
        const parameters = JSON.parse(card.parameters.value || "{}");
        return { type: "function", function: { name: card.name.value.trim(), description: card.description.value, parameters } };
      } catch (error) {
        card.error.textContent = `The parameters are no JSON: ${error.message}`;
        right = false;
        return null;
      }
    });
    return right ? told : null;
  }
}

/** An answer as it comes, shown in `item`. */
class Reply {
  calls = [];
  #item;
  #text = null;
  #thought = null;
  #began = performance.now();
  #first = null;
  #usage = null;
  #timing = {};
  #cache = "";
  #replica = "";

  constructor(item) {
    this.#item = item;
  }

  served(headers) {
    this.#cache = headers.get("x-holdfast-cache") ?? "";
    this.#replica = headers.get("x-holdfast-replica") ?? "";
  }

  take(chunk) {
    const delta = chunk.choices[0]?.delta ?? {};
    if (delta.content || delta.tool_calls) this.#first ??= performance.now();
    if (delta.reasoning_content) (this.#thought ??= this.#paragraph("thought")).append(delta.reasoning_content);
    if (delta.content) (this.#text ??= this.#paragraph("")).append(delta.content);
    for (const piece of delta.tool_calls ?? []) this.#call(piece);
    const closed = chunk.holdfast?.tool_call_closed;
    if (closed !== undefined) this.calls[closed]?.close(performance.now() - this.#began);
    this.#usage = chunk.usage ?? this.#usage;
    this.#timing = chunk.timing ?? this.#timing;
  }

  /** The answer is over: the calls that can be answered. Others were cut, and are no part of the conversation. */
  ended() {
    this.calls.filter((call) => !call.closed).forEach((call) => call.cut());
    return (this.calls = this.calls.filter((call) => call.closed));
  }

  get message() {
    const message = { role: "assistant", content: this.#text?.textContent ?? (this.calls.length ? null : "") };
    if (this.calls.length) message.tool_calls = this.calls.map((call) => call.message);
    return message;
  }

  /** What it cost, in words. */
  get summary() {
    const usage = this.#usage;
    const { drafted, accepted, queue_ms, prefill_ms, decode_ms } = this.#timing;
    if (this.#cache === "hit") return "an equal request came before: answered by the response cache";
    if (!usage) return "";
    const told = [
      `${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details.cached_tokens} reused`,
      `${usage.completion_tokens} generated${drafted ? `, ${accepted} of ${drafted} drafts accepted` : ""}`,
    ];
    if (queue_ms !== undefined) told.push(`queue ${duration(queue_ms / 1e3)}, prefill ${duration((prefill_ms ?? 0) / 1e3)}, decode ${duration((decode_ms ?? 0) / 1e3)}`);
    if (this.#first) told.push(`first word here after ${duration((this.#first - this.#began) / 1e3)}`);
    return [...told, this.#replica].join(" · ");
  }

  #paragraph(className) {
    return this.#item.appendChild(el("p", { className }));
  }

  #call({ index, id, function: called }) {
    this.calls[index] ??= new Call(this.#item, id, called.name);
    this.calls[index].add(called.arguments ?? "");
  }
}

/** A call: shown as it is written, to be answered once it has closed. */
class Call {
  closed = false;
  #arguments = el("span");
  #sign = el("span", { className: "sign" }, "being written…");
  #box;
  #answer;

  constructor(item, id, name) {
    this.id = id;
    this.name = name;
    this.answered = new Promise((resolve) => (this.#answer = resolve));
    this.#box = item.appendChild(el("div", { className: "call" }, this.#sign, el("code", {}, `${name} `, this.#arguments)));
  }

  get message() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.#arguments.textContent } };
  }

  add(text) {
    this.#arguments.append(text);
  }

  cut() {
    this.#box.classList.add("cut");
    this.#sign.textContent = "cut off: it cannot be answered";
  }

  close(ms) {
    this.closed = true;
    this.#box.classList.add("closed");
    this.#sign.textContent = `closed after ${duration(ms / 1e3)}`;
    const words = el("input", { placeholder: `what ${this.name} gives back`, ariaLabel: `Result of ${this.name}` });
    words.style.flex = "1";
    const form = el("form", {}, words, el("button", {}, "Answer"));
    form.onsubmit = (event) => {
      event.preventDefault();
      form.replaceWith(el("div", { className: "hint result" }, `→ ${words.value}`));
      this.#answer(words.value);
    };
    this.#box.append(form);
    words.focus();
  }
}
