// The Numbers view: what this server saved since it started, summed over the routers that have answered.

import { $, count, duration, el, share, table } from "./dom.js";

export function showNumbers(programs) {
  const totals = programs.totals();
  const sum = {};
  for (const counts of totals.values()) for (const [name, value] of Object.entries(counts)) sum[name] = (sum[name] ?? 0) + value;
  const routers = [...programs.routers.values()];
  const began = Math.min(...routers.map((router) => router.started));
  const who = programs.answer.operator ? "All tenants" : `Tenant ${programs.answer.tenant}`;
  const told = routers.length > 1 ? `${routers.length} routers, the first` : "this router";
  const heads = ["tenant", "requests", "prompt tokens", "reused", "generated", "accepted drafts", "of drafts", "cached answers"];
  const rows = [...totals].map(([name, each]) => [
    name, count(each.ended), count(each.prompt_tokens), count(each.cached_tokens), count(each.completion_tokens),
    count(each.accepted_tokens), share(each.accepted_tokens, each.drafted_tokens), count(each.cached_answers),
  ]);
  $("numbers").replaceChildren(
    el("p", { className: "hint" }, `${who}, since ${told} started ${duration(programs.now() - began)} ago.`),
    el("div", { className: "figures" },
      figure(count(sum.cached_tokens ?? 0), "prompt tokens reused",
        `${share(sum.cached_tokens, sum.prompt_tokens)} of ${count(sum.prompt_tokens ?? 0)} prompt tokens were in the cache, and not computed again.`),
      figure(count(sum.accepted_tokens ?? 0), "drafts accepted",
        `Tokens without a forward pass of their own: ${acceptedDrafts(sum)}, of ${count(sum.completion_tokens ?? 0)} generated tokens.`),
      figure(count(sum.cached_answers ?? 0), "answers from the response cache",
        `${share(sum.cached_answers, sum.ended)} of ${count(sum.ended ?? 0)} requests were answered without a replica.`)),
    el("h2", {}, "By tenant"),
    table(heads, rows));
}

function acceptedDrafts(sum) {
  if (!sum.drafted_tokens) return "nothing was drafted yet";
  return `${share(sum.accepted_tokens, sum.drafted_tokens)} of ${count(sum.drafted_tokens)} drafts were accepted`;
}

function figure(number, name, text) {
  return el("div", { className: "figure" }, el("strong", {}, number), name, el("p", {}, text));
}
