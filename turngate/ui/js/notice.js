/** Messages of the page: short notices, and boxes for empty, failed and loading content. */

import { el, fill } from "./dom.js";

const STAYS_MS = 6000;

/**
 * Show a short message, which screen readers read out.
 * @param {string} text
 * @param {"info" | "bad"} [tone]
 */
export function say(text, tone = "info") {
  const region = document.getElementById("notices");
  if (!region) return;
  const notice = el("div.notice", { class: tone === "bad" ? "is-bad" : "", text });
  region.append(notice);
  setTimeout(() => notice.remove(), STAYS_MS);
}

/**
 * Create a box for empty content: why it is empty, and what to do.
 * @param {string} title
 * @param {string} advice
 * @param {...any} extra
 */
export function empty(title, advice, ...extra) {
  return el("div.empty", { role: "note" }, el("h2", { text: title }), el("p", { text: advice }), ...extra);
}

/**
 * Create a box for content that could not be loaded.
 * @param {unknown} error
 * @param {() => void} [again]
 */
export function failed(error, again) {
  const text = error instanceof Error ? error.message : String(error);
  const button = again && el("button.button", { type: "button", text: "Try again", on: { click: again } });
  return el(
    "div.empty.is-bad",
    { role: "alert" },
    el("h2", { text: "Could not load this" }),
    el("p", { text }),
    button,
  );
}

/** Create a box for content that is loading. */
export function loading() {
  return el("div.loading", { role: "status" }, el("span.spinner", { "aria-hidden": "true" }), "Loading …");
}

/**
 * Show the result of `make` in `place`: first a spinner, then the content, or the error if it fails.
 * @param {Element} place
 * @param {() => Promise<any>} make
 */
export async function into(place, make) {
  fill(place, loading());
  try {
    fill(place, await make());
  } catch (error) {
    fill(
      place,
      failed(error, () => into(place, make)),
    );
  }
}
