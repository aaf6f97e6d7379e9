// Draws programs over time: one row each, and above them how many were in each state.
//
//   past                                             now      to come
//   |  queue  prefill  decode ~~~~ tool pause ~~~~~~~ | ~~~~~~~ pinned until
//
// A turn's prefill is as high as its prompt: the reused part pale above, the computed part below.

import { pauseAfter, state } from "./programs.js";

const FUTURE = 0.22; // of the width is after now
const NAMES = 150; // pixels for names, where rows are high enough for them
const LEAST = 1.5; // pixels of a stage, however short
const THIN = 5;
const HIGH = 22;
const NAMED = 60; // programs; more of them get thin rows

/** Where times are in a canvas of `width` pixels that shows the last `seconds`. */
export function axis(width, left, seconds, now) {
  const present = left + (width - left) * (1 - FUTURE);
  const scale = (present - left) / seconds;
  return { left, width, now, present, seconds, from: now - seconds, x: (time) => present + (time - now) * scale };
}

/** A row's height for so many programs. */
export function rowHeight(choice, programs) {
  if (choice !== "auto") return Number(choice);
  return programs <= NAMED ? HIGH : THIN;
}

export const left = (height) => (height < 12 ? 8 : NAMES);

/** A canvas fitted to its place on the page, and cleared; drawn on in CSS pixels. */
export function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    Object.assign(canvas, { width: w, height: h });
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The rows of `programs` from pixel `top` on. */
export function drawRows(context, programs, axis, { top, height, room, colours, chosen }) {
  grid(context, axis, room, colours);
  const first = Math.max(0, Math.floor(top / height));
  const shown = programs.slice(first, first + Math.ceil(room / height) + 1);
  shown.forEach((program, index) => {
    const y = (first + index) * height - top;
    if (program.key === chosen) fill(context, colours.raised, 0, y, axis.width, height);
    context.save();
    context.beginPath();
    context.rect(axis.left, y, axis.width - axis.left, height);
    context.clip();
    drawProgram(context, program, axis, y, height, colours);
    context.restore();
    if (height >= 12) name(context, program, y, height, axis.left - 8, colours);
  });
  fill(context, colours.ink, axis.present, 0, 1, room);
}

function drawProgram(context, program, axis, y, height, colours) {
  const pad = height >= 12 ? 4 : 1;
  const [top, high] = [y + pad, height - 2 * pad];
  const seen = (from, to) => to >= axis.from && axis.x(from) <= axis.width;
  const box = (colour, from, to, part = [0, 1], least = 0) => {
    if (!seen(from, to)) return;
    const x = axis.x(from);
    const [above, below] = part.map((share) => Math.round(top + share * high));
    if (part[1] > part[0]) fill(context, colour, x, above, Math.max(axis.x(to) - x, least), Math.max(1, below - above));
  };
  for (const pin of program.pins) {
    const kept = program.pin && pin === program.pins.at(-1);
    context.globalAlpha = 0.5;
    box(colours.pinned, pin.from, kept ? Math.max(pin.worth, axis.now) : pin.to, [0.15, 0.85]);
    context.globalAlpha = 0.18; // until here at the latest; it gives way to others before
    if (kept) box(colours.pinned, Math.max(pin.worth, axis.now), pin.until, [0.15, 0.85]);
    context.globalAlpha = 1;
  }
  program.turns.forEach((turn, index) => {
    const pause = pauseAfter(program, index, axis.now);
    if (pause) box(colours.tools, pause.from, pause.to, [0.4, 0.6]);
  });
  for (const turn of program.turns) {
    if (!seen(turn.arrived, turn.ended)) continue;
    if (turn.outcome === "completed") drawStages(box, turn, turn.ended, colours);
    else box(turn.outcome === "cached" ? colours.answered : colours.failed, turn.arrived, turn.ended, [0, 1], 2 * LEAST);
  }
  for (const turn of program.running.values()) drawStages(box, turn, axis.now, colours);
}

function drawStages(box, turn, end, colours) {
  const { arrived, prefillFrom = end, decodeFrom = end } = turn;
  const cached = turn.prompt ? turn.cached / turn.prompt : 0;
  box(colours.queue, arrived, prefillFrom);
  if (prefillFrom < end || decodeFrom < end) {
    box(colours.cached, prefillFrom, decodeFrom, [0, cached], LEAST);
    box(colours.computed, prefillFrom, decodeFrom, [cached, 1], LEAST);
  }
  if (decodeFrom < end) box(colours.decode, decodeFrom, end, [0, 1], LEAST);
}

function name(context, program, y, height, room, colours) {
  const now = state(program);
  context.fillStyle = colours[now === "prefill" ? "computed" : now] ?? colours.idle;
  context.fillRect(2, y + height / 2 - 3, 6, 6);
  context.fillStyle = now === "idle" ? colours.faint : colours.ink;
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillText(shortened(context, program.name, room - 13), 13, y + height / 2 + 0.5);
}

/** `text` in `room` pixels: names often differ at their ends alone, so it is the middle that goes. */
function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = Math.floor(text.length / 2);
  const short = () => `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
  for (kept *= 2; kept > 1 && context.measureText(short()).width > room; kept--);
  return short();
}

const STATES = ["decode", "computed", "queue", "tools"]; // from the ground up

/** How many programs were in each state, from the turns and pauses that are known. */
export function drawOverview(context, programs, axis, height, colours) {
  const bins = Math.max(1, Math.min(240, Math.floor((axis.present - axis.left) / 3)));
  const step = axis.seconds / bins;
  const changes = Object.fromEntries(STATES.map((name) => [name, new Float64Array(bins + 2)]));
  const add = (name, from, to) => {
    const begin = Math.max(0, Math.ceil((from - axis.from) / step - 0.5));
    const end = Math.min(bins, Math.ceil((to - axis.from) / step - 0.5));
    if (end > begin) (changes[name][begin] += 1), (changes[name][end] -= 1);
  };
  const stages = ({ arrived, prefillFrom, decodeFrom }, end) => {
    add("queue", arrived, prefillFrom ?? end);
    add("computed", prefillFrom ?? end, decodeFrom ?? end);
    add("decode", decodeFrom ?? end, end);
  };
  for (const program of programs) {
    program.turns.forEach((turn, index) => {
      if (turn.outcome === "completed" && turn.ended > axis.from) stages(turn, turn.ended);
      const pause = pauseAfter(program, index, axis.now);
      if (pause && pause.to > axis.from) add("tools", pause.from, pause.to);
    });
    for (const turn of program.running.values()) stages(turn, axis.now);
  }
  const floor = new Float64Array(bins);
  const levels = STATES.map((name) => {
    let sum = 0;
    for (let bin = 0; bin < bins; bin++) floor[bin] += sum += changes[name][bin];
    return floor.slice();
  });
  const peak = Math.max(...floor);
  const most = Math.max(4, peak); // so that one program alone does not fill the picture
  const wide = (axis.present - axis.left) / bins;
  grid(context, axis, height, colours);
  for (let layer = STATES.length - 1; layer >= 0; layer--) {
    context.fillStyle = colours[STATES[layer]];
    levels[layer].forEach((value, bin) => {
      const high = (value / most) * (height - 16);
      const [x, end] = [bin, bin + 1].map((edge) => Math.round(axis.left + edge * wide)); // whole pixels: no seams
      context.fillRect(x, height - high, end - x, high);
    });
  }
  context.fillStyle = colours.faint;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  const told = `${peak} at once`;
  context.fillText(told, axis.left + 4, 2);
  fill(context, colours.ink, axis.present, 0, 1, height);
  context.fillText("now", axis.present + 4, 2);
  const roomy = axis.width - axis.present >= 120;
  const last = roomy ? axis.width - 4 - context.measureText("pinned until").width : axis.width;
  if (roomy) context.fillText("pinned until", last, 2);
  const taken = [[0, axis.left + 4 + context.measureText(told).width], [axis.present, axis.present + 30], [last, axis.width]];
  context.fillStyle = colours.faint;
  for (const time of ticks(axis)) clock(context, time, axis.x(time) + 4, taken);
}

/** The time of day at `x`, where nothing else is written. */
function clock(context, time, x, taken) {
  const text = new Date(time * 1000).toLocaleTimeString([], { hourCycle: "h23" });
  const end = x + context.measureText(text).width;
  if (taken.some(([from, to]) => x < to + 8 && end > from - 8)) return;
  taken.push([x, end]);
  context.fillText(text, x, 2);
}

function grid(context, axis, height, colours) {
  for (const time of ticks(axis)) fill(context, colours.line, axis.x(time), 0, 1, height);
}

/** Round times that are in the picture. */
function ticks(axis) {
  const every = axis.seconds > 120 ? 60 : axis.seconds > 30 ? 10 : 5;
  const times = [];
  for (let time = Math.ceil(axis.from / every) * every; axis.x(time) < axis.width; time += every) times.push(time);
  return times;
}

function fill(context, colour, x, y, width, height) {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
}
