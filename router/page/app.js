// The views, the key, and one request a second while the page is visible.

import { ApiError, ask, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, duration } from "./dom.js";
import { LiveView } from "./live.js";
import { showNumbers } from "./numbers.js";
import { Programs } from "./programs.js";

const EVERY_MS = 1000;
const VIEWS = ["live", "try", "numbers"];

const programs = new Programs();
const live = new LiveView(programs);
const chat = new Chat((name) => live.choose(`${programs.answer?.tenant}/${name}`));
let asking = false;

function view() {
  const name = location.hash.slice(1);
  return VIEWS.includes(name) ? name : "live";
}

function show() {
  for (const name of VIEWS) $(name).hidden = name !== view();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  refresh();
}

function refresh() {
  if (!programs.answer) return;
  if (view() === "live") live.refresh();
  if (view() === "numbers") showNumbers(programs);
}

async function look() {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const answer = await (await ask(`v1/live?since=${programs.since()}`)).json();
    programs.take(answer);
    $("key").hidden = true;
    $("forget").hidden = !sessionStorage.length;
    const routers = programs.routers.size > 1 ? `, ${programs.routers.size} routers heard` : "";
    connection(`${answer.version} · ${answer.tenant}${answer.operator ? "" : " (your programs)"} · up ${duration(answer.time - answer.started)}${routers}`);
    await chat.models();
    refresh();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("key").hidden = error.status !== 401;
    connection(error.message, true);
  } finally {
    asking = false;
  }
}

function connection(text, bad = false) {
  $("connection").textContent = text;
  $("connection").classList.toggle("bad", bad);
}

$("key").onsubmit = (event) => {
  event.preventDefault();
  setKey($("key-text").value.trim());
  $("key-text").value = "";
  look();
};
$("forget").onclick = () => {
  setKey("");
  location.reload();
};

function film(time) {
  if (view() === "live") live.frame(time);
  requestAnimationFrame(film);
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", look);
setInterval(look, EVERY_MS);
show();
look();
requestAnimationFrame(film);
