// Makes elements and formats numbers. The server's words enter the page as text, never as markup.

/** An element with properties and children; `class` and `data-…` are set as attributes, handlers as `onclick`. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key === "className" ? "class" : key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const $ = (id) => document.getElementById(id);

/** `4 ms`, `4.2 s`, `3m05s`, `2h03m`. */
export function duration(seconds) {
  if (seconds < 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  return minutes < 60 ? `${minutes}m${two(seconds % 60)}s` : `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
}

/** `999`, `12.3k`, `1.5M`. */
export function count(number) {
  for (const [limit, unit, by] of [[1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]]) {
    if (number >= limit) return `${(number / by).toFixed(1)}${unit}`;
  }
  return String(Math.round(number));
}

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** A bar of parts `[class, amount, title]` of `whole`. */
export function bar(parts, whole = parts.reduce((sum, [, amount]) => sum + amount, 0)) {
  const made = el("div", { className: "bar" });
  for (const [name, amount, title] of parts) {
    if (!amount) continue;
    const part = el("span", { className: name, title: title ?? "" });
    part.style.flexBasis = `${(100 * amount) / (whole || 1)}%`;
    made.append(part);
  }
  return made;
}

/** Rows under heads; on a narrow screen each row is a card, which names its cells by `data-head`. */
export function table(heads, rows) {
  return el("div", { className: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", { "data-head": heads[at] }, cell)))))));
}
