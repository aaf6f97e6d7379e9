// Programs with their turns and pauses, replicas and totals, from the answers of `/v1/live`. Knows no document.
//
// Each answer has the turns of one router, and what all replicas do. Times are the server's.

const FORGET_S = 600; // a program of which nothing was heard for so long
const GONE_S = 15; // a router that has not answered for so long: what ran there is not known any more
const MOST = 4096; // programs

export class Programs {
  constructor() {
    this.byKey = new Map();
    this.routers = new Map();
    this.replicas = [];
    this.answer = null; // the latest
    this.offset = 0; // of the server's clock to ours, in seconds
  }

  /** Seconds since 1970 on the server's clock. */
  now() {
    return Date.now() / 1000 + this.offset;
  }

  /** What is known already, in the form of the parameter `since`. */
  since() {
    return [...this.routers].slice(-12).map(([name, router]) => `${name}:${router.number}`).join(",");
  }

  /** Take in an answer. */
  take(answer) {
    const offset = answer.time - Date.now() / 1000;
    this.offset = this.answer && Math.abs(offset - this.offset) < 2 ? 0.8 * this.offset + 0.2 * offset : offset;
    this.answer = answer;
    const { fields } = answer;
    const router = this.routers.get(answer.router) ?? { running: new Map() };
    this.routers.delete(answer.router); // behind the others: the latest is last
    this.routers.set(answer.router, router);
    router.heard = answer.time;
    Object.assign(router, { number: answer.number, started: answer.started, tenants: answer.tenants });
    for (const row of answer.ended) this.#ended(named(fields.ended, row), router);
    this.#running(router, answer.live.map((row) => named(fields.live, row)), answer.time);
    this.#replicas(answer, fields);
    this.#forget(answer.time);
  }

  /** Sums over the routers that have answered, by tenant. */
  totals() {
    const sums = new Map();
    for (const { tenants } of this.routers.values()) {
      for (const { name, ...counts } of tenants) {
        const sum = sums.get(name) ?? {};
        for (const [key, value] of Object.entries(counts)) sum[key] = (sum[key] ?? 0) + value;
        sums.set(name, sum);
      }
    }
    return sums;
  }

  #program(key) {
    let found = this.byKey.get(key);
    if (!found) {
      const [tenant, ...name] = key.split("/");
      found = { key, tenant, name: name.join("/"), turns: [], running: new Map(), pins: [], pin: null, first: Infinity, last: 0 };
      this.byKey.set(key, found);
    }
    return found;
  }

  #ended(turn, router) {
    const program = this.#program(turn.program);
    if (program.turns.some((known) => known.request === turn.request)) return;
    program.running.delete(turn.request);
    router.running.delete(turn.request);
    turn.decodeFrom = turn.ended - turn.decode_s;
    turn.prefillFrom = turn.decodeFrom - turn.prefill_s;
    program.turns.push(turn);
    program.turns.sort((one, other) => one.arrived - other.arrived); // several routers tell in no order
    if (program.turns.length > 256) program.turns.shift();
    program.first = Math.min(program.first, turn.arrived);
    program.last = Math.max(program.last, turn.ended);
  }

  #running(router, live, time) {
    const still = new Set(live.map((turn) => turn.request));
    for (const [request, key] of router.running) {
      if (!still.has(request)) this.byKey.get(key)?.running.delete(request);
    }
    router.running = new Map(live.map((turn) => [turn.request, turn.program]));
    for (const { program: key, request, arrived } of live) {
      const program = this.#program(key);
      if (!program.running.has(request)) program.running.set(request, { request, arrived, phase: "line" });
      program.first = Math.min(program.first, arrived);
      program.last = time;
    }
  }

  #replicas(answer, fields) {
    const time = answer.time - answer.looked_s; // several pages share what replicas were asked
    const before = new Map(this.replicas.map((each) => [each.replica, each]));
    const pins = new Map();
    this.replicas = answer.replicas.map(({ replica, status, turns, pins: kept }) => {
      for (const turn of turns.map((row) => named(fields.turns, row))) this.#phase(turn, replica, time);
      for (const pin of kept.map((row) => named(fields.pins, row))) pins.set(pin.program, { ...pin, replica });
      return { replica, status, time, before: before.get(replica) };
    });
    for (const each of this.replicas) if (each.before) delete each.before.before; // one look back, no chain
    for (const program of this.byKey.values()) this.#pin(program, pins.get(program.key), time);
  }

  #phase(turn, replica, time) {
    const key = [...this.routers.values()].map((router) => router.running.get(turn.request)).find(Boolean);
    const running = key && this.byKey.get(key)?.running.get(turn.request);
    if (!running) return;
    if (turn.phase !== "queue") running.prefillFrom ??= time;
    if (turn.phase === "decode") running.decodeFrom ??= time;
    Object.assign(running, turn, { replica });
  }

  /** A pin is shown as long as it was seen, and what is pinned now until when it will be kept. */
  #pin(program, pin, time) {
    program.pin = pin ?? null;
    if (!pin) return;
    const from = time - pin.since_s;
    let known = program.pins.at(-1);
    if (!known || Math.abs(known.from - from) > 0.5) program.pins.push((known = { from }));
    Object.assign(known, { to: time, cells: pin.cells, worth: time + pin.worth_s, until: time + pin.until_s });
    if (program.pins.length > 64) program.pins.shift();
    program.last = Math.max(program.last, from);
  }

  #forget(time) {
    for (const [name, router] of this.routers) {
      if (time - router.heard > GONE_S) {
        for (const [request, key] of router.running) this.byKey.get(key)?.running.delete(request);
        router.running.clear();
      }
      if (time - router.heard > FORGET_S) this.routers.delete(name);
    }
    const quiet = (program) => !program.running.size && !program.pin && time - program.last > FORGET_S;
    for (const [key, program] of this.byKey) if (quiet(program)) this.byKey.delete(key);
    if (this.byKey.size > MOST) {
      const oldest = [...this.byKey.values()].sort((one, other) => one.last - other.last);
      for (const { key } of oldest.slice(0, this.byKey.size - MOST)) this.byKey.delete(key);
    }
  }
}

/** `queue`, `prefill`, `decode`, `tools` or `idle`. A turn that no replica has yet waits, too. */
export function state(program) {
  let found = "";
  for (const { phase } of program.running.values()) {
    if (phase === "decode") return "decode";
    found = phase === "prefill" ? "prefill" : found || "queue";
  }
  return found || (program.turns.at(-1)?.tools ? "tools" : "idle");
}

/** The pause after a turn: from its end until the next one came, or until now. None where it called no tool. */
export function pauseAfter(program, index, now) {
  const turn = program.turns[index];
  if (!turn.tools) return null;
  const next = program.turns[index + 1]?.arrived ?? Math.min(now, ...[...program.running.values()].map((each) => each.arrived));
  return { tools: turn.tools, from: turn.ended, to: Math.max(next, turn.ended), open: next === now };
}

function named(names, row) {
  return Object.fromEntries(names.map((name, index) => [name, row[index]]));
}
