// The Live view: a timeline of programs, the turns of the chosen one, replicas with their cells, and tenants.

import { $, bar, count, duration, el, share, table } from "./dom.js";
import { pauseAfter, state } from "./programs.js";
import { axis, drawOverview, drawRows, fitted, left, rowHeight } from "./timeline.js";

const FRAME_MS = 50; // between two frames
const COLOURS = ["queue", "computed", "cached", "answered", "decode", "tools", "pinned", "failed", "idle", "ink", "faint", "line", "raised"];
const LEGEND = [
  ["queue", "queue"], ["computed", "prefill, computed"], ["cached", "prefill, reused"], ["decode", "decode"],
  ["tools", "tool runs"], ["pinned", "pinned"], ["answered", "answered by the response cache"], ["failed", "failed"],
];
const STATES = [
  ["all", "programs", () => true],
  ["run", "running", (now) => now !== "tools" && now !== "idle"],
  ["tools", "at tools", (now) => now === "tools"],
  ["idle", "idle", (now) => now === "idle"],
];
const CELLS = [["queue", "held", "cells_held"], ["pinned", "pinned", "cells_pinned"], ["computed", "cached", "cells_cached"]];

export class LiveView {
  #programs;
  #shown = []; // programs that pass the filters, the latest first
  #state = "all";
  #chosen = null;
  #colours = {};
  #drawn = 0;
  #told = ""; // of the chosen program
  #chipsTold = "";

  constructor(programs) {
    this.#programs = programs;
    $("legend").append(...LEGEND.map(([name, text]) => el("span", {}, el("i", { className: `swatch ${name}` }), text)));
    for (const id of ["filter", "window", "rows"]) $(id).oninput = () => this.refresh();
    $("timeline").onclick = (event) => this.choose(this.#at(event.offsetY)?.key);
    $("timeline").onmousemove = (event) => ($("timeline").title = this.#at(event.offsetY)?.name ?? "");
    $("scroll").onkeydown = (event) => this.#key(event);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#readColours());
    this.#readColours();
  }

  /** Show the turns of this program; of none without a key. */
  choose(key) {
    this.#chosen = key === this.#chosen ? null : (key ?? null);
    this.#told = "";
    this.refresh();
  }

  /** Show the programs as they are now. */
  refresh() {
    const now = this.#programs.now();
    const seconds = Number($("window").value);
    const words = $("filter").value.trim().toLowerCase();
    const recent = [...this.#programs.byKey.values()].filter(
      (program) => program.running.size || program.pin || program.last > now - seconds || program.key === this.#chosen,
    );
    const named = words ? recent.filter((program) => program.key.toLowerCase().includes(words)) : recent;
    const states = new Map(named.map((program) => [program, state(program)]));
    const passes = Object.fromEntries(STATES.map(([name, , test]) => [name, test]));
    this.#shown = named.filter((program) => passes[this.#state](states.get(program))).sort((a, b) => b.first - a.first);
    this.#chips([...states.values()]);
    $("nothing").hidden = this.#shown.length > 0;
    $("timeline").setAttribute("aria-label", this.#shown.slice(0, 40).map((each) => `${each.name}: ${states.get(each)}`).join(", "));
    this.#program();
    this.#replicas();
    this.#tenants();
    this.#drawn = 0;
  }

  /** Draw one frame. */
  frame(time) {
    if (time - this.#drawn < (matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : FRAME_MS)) return;
    this.#drawn = time;
    const [scroll, now] = [$("scroll"), this.#programs.now()];
    const wide = scroll.clientWidth;
    if (!wide) return;
    const { height, room } = this.#size();
    $("height").style.height = `${Math.max(0, this.#shown.length * height - room)}px`;
    const times = axis(wide, left(height) * Math.min(1, wide / 700), Number($("window").value), now);
    drawOverview(fitted($("overview"), wide, 64), this.#shown, times, 64, this.#colours);
    const options = { top: scroll.scrollTop, height, room, colours: this.#colours, chosen: this.#chosen };
    drawRows(fitted($("timeline"), wide, room), this.#shown, times, options);
  }

  #size() {
    const most = Math.round(innerHeight * 0.56);
    const height = rowHeight($("rows").value, this.#shown.length);
    return { height, room: Math.min(most, Math.max(1, this.#shown.length) * height) };
  }

  #at(y) {
    return this.#shown[Math.floor((y + $("scroll").scrollTop) / this.#size().height)];
  }

  #key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !this.#shown.length) return;
    event.preventDefault();
    const at = this.#shown.findIndex((program) => program.key === this.#chosen);
    const next = this.#shown[Math.min(this.#shown.length - 1, Math.max(0, at + by))];
    if (next.key !== this.#chosen) this.choose(next.key);
    const { height, room } = this.#size();
    const y = this.#shown.indexOf(next) * height;
    if (y < $("scroll").scrollTop) $("scroll").scrollTop = y;
    if (y + height > $("scroll").scrollTop + room) $("scroll").scrollTop = y + height - room;
  }

  #chips(states) {
    const made = STATES.map(([name, text, test]) => {
      const found = states.filter(test).length;
      const word = found === 1 && name === "all" ? "program" : text;
      const onclick = () => { this.#state = name; this.refresh(); };
      return el("button", { ariaPressed: String(this.#state === name), onclick }, el("b", {}, String(found)), ` ${word}`);
    });
    const told = this.#state + made.map((each) => each.textContent);
    if (told === this.#chipsTold) return; // a click that is under way would lose its button
    this.#chipsTold = told;
    $("chips").replaceChildren(...made);
  }

  // ---- one program ----

  #program() {
    const program = this.#programs.byKey.get(this.#chosen);
    $("program").hidden = !program;
    if (!program) return;
    const now = this.#programs.now();
    const told = JSON.stringify([program.turns.length, [...program.running.values()], Math.floor(now)]);
    if (told === this.#told) return;
    this.#told = told;
    const turns = program.turns.map((turn, index) => [turn, pauseAfter(program, index, now)]).reverse();
    const scrolled = $("program").querySelector("ol")?.scrollTop ?? 0;
    $("program").replaceChildren(
      el("header", {},
        el("h2", {}, program.name),
        el("span", {}, said(program, now)),
        el("button", { className: "quiet", onclick: () => this.choose(program.key), ariaLabel: "Close" }, "×")),
      el("ol", {},
        [...program.running.values()].map((turn) => el("li", {}, running(turn, now))),
        turns.map(([turn, pause]) => el("li", {}, pause && el("div", { className: "pause" }, paused(pause)), ended(turn)))));
    $("program").querySelector("ol").scrollTop = scrolled;
  }

  // ---- replicas and tenants ----

  #replicas() {
    const found = this.#programs.replicas.filter((each) => each.status);
    const own = this.#programs.replicas.length && !found.length ? this.#programs.byKey : null;
    if (own) {
      const pins = [...own.values()].map((program) => program.pin).filter(Boolean);
      const cells = pins.reduce((sum, pin) => sum + pin.cells, 0);
      $("replicas").replaceChildren(el("p", { className: "hint" }, `Pinned for your programs: ${count(cells)} cells, ${pins.length} programs. Replicas are shown to operators.`));
      return;
    }
    const heads = ["replica", "cells", "free", "running", "waiting", "pinned programs", "prompt reused", "accepted drafts", "generated"];
    const rows = found.map(({ status, before, time }) => {
      const parts = CELLS.map(([colour, name, field]) => {
        const cells = field === "cells_cached" ? Math.max(0, status.cells_tree - status.cells_pinned) : status[field];
        return [colour, cells, `${name}: ${cells} cells`];
      });
      const past = before?.status;
      const generated = past ? `${count((status.completion - past.completion) / Math.max(0.2, time - before.time))} tok/s` : `${count(status.completion)} tok`;
      return [
        `${status.replica_id} · ${status.model} on ${status.device}`, bar(parts, status.cells_total), share(status.cells_free, status.cells_total),
        status.running, status.waiting, status.pins, share(status.prompt_cached, status.prompt_cached + status.prompt_computed),
        share(status.accepted, status.drafted), generated,
      ];
    });
    const key = el("p", { className: "key" }, CELLS.map(([colour, name]) => el("span", {}, el("i", { className: `swatch ${colour}` }), name)), el("span", {}, el("i", { className: "swatch free" }), "free"));
    $("replicas").replaceChildren(...(rows.length ? [el("h2", {}, "Replicas"), table(heads, rows), key] : []));
  }

  #tenants() {
    const running = new Map();
    for (const program of this.#programs.byKey.values()) {
      running.set(program.tenant, (running.get(program.tenant) ?? 0) + program.running.size);
    }
    const rows = [...this.#programs.totals()].map(([name, sum]) => [
      name, running.get(name) ?? 0, count(sum.ended), count(sum.failed), count(sum.rejected), count(sum.prompt_tokens),
      share(sum.cached_tokens, sum.prompt_tokens), count(sum.completion_tokens),
    ]);
    const heads = ["tenant", "running", "ended", "failed", "refused", "prompt tokens", "reused", "generated"];
    $("tenants").replaceChildren(...(rows.length ? [el("h2", {}, "Tenants"), table(heads, rows)] : []));
  }

  #readColours() {
    const style = getComputedStyle(document.documentElement);
    this.#colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`)]));
  }
}

/** The state of a program, in words. */
function said(program, now) {
  const turns = `${program.turns.length} ${program.turns.length === 1 ? "turn" : "turns"} seen`;
  const kept = program.pin && program.pins.at(-1);
  if (!kept) return `${program.tenant} · ${state(program)} · ${turns}`;
  const until = kept.worth > now ? `kept for ${duration(kept.worth - now)} more` : "may be evicted";
  return `${program.tenant} · ${state(program)} · ${turns} · ${kept.cells} cells pinned on ${program.pin.replica}, ${until}, unpinned in ${duration(kept.until - now)}`;
}

function paused(pause) {
  const length = duration(pause.to - pause.from);
  return pause.open ? `${pause.tools} running for ${length}` : `${pause.tools} ran ${length}`;
}

function running(turn, now) {
  const got = turn.prompt ? `${turn.prompt} prompt tokens, ${turn.cached} reused, ${turn.drawn} generated` : "waits for a replica";
  return [`now · ${turn.phase} · ${duration(now - turn.arrived)} · ${got}`, tokens(turn)];
}

function ended(turn) {
  const at = new Date(turn.arrived * 1000).toLocaleTimeString();
  if (turn.outcome === "cached") return [`${at} · answered by the response cache`];
  if (turn.outcome !== "completed") return [`${at} · ${turn.outcome} after ${duration(turn.ended - turn.arrived)}`];
  const drafts = turn.drafted ? `, ${turn.accepted} of ${turn.drafted} drafts accepted` : "";
  const stages = `queue ${duration(turn.queue_s)}, prefill ${duration(turn.prefill_s)}, decode ${duration(turn.decode_s)}`;
  const text = `${at} · ${turn.prompt} prompt tokens, ${turn.cached} reused · ${turn.drawn} generated${drafts} · ${stages} · ${turn.replica}`;
  return [turn.tools ? `${text} · called ${turn.tools}` : text, tokens(turn)];
}

function tokens(turn) {
  if (!turn.prompt) return null;
  return bar([
    ["cached", turn.cached, `${turn.cached} reused`],
    ["computed", turn.prompt - turn.cached, `${turn.prompt - turn.cached} computed`],
    ["decode", turn.drawn, `${turn.drawn} generated`],
  ]);
}
