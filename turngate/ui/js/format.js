/** Format numbers, durations, and relative and exact times. */

import { el } from "./dom.js";

const NONE = "–";
const HUGE = 1e12; // from here on, scientific notation is easier to read
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/**
 * Format a count, such as 12,345.
 * @param {number | null | undefined} value
 */
export function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

/**
 * Format a count for narrow spaces, such as 12.3 k.
 * @param {number | null | undefined} value
 */
export function short(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) < 10000) return count(value);
  for (const [size, unit] of /** @type {[number, string][]} */ ([
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return count(value);
}

/**
 * Format a number with a readable number of digits. An unknown value is a dash, never 0.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Math.abs(value) >= HUGE) return value.toExponential(digits - 1);
  if (Number.isInteger(value)) return whole.format(value);
  if (Math.abs(value) >= 1000) return whole.format(value);
  if (Math.abs(value) < 1e-4 && value !== 0) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

/**
 * Format a reward or advantage with a fixed number of digits, so that columns line up.
 * @param {number | null | undefined} value
 * @param {boolean} [signed]
 */
export function score(value, signed = false) {
  if (value === null || value === undefined) return NONE;
  const text = (Math.abs(value) >= HUGE ? value.toExponential(2) : value.toFixed(2)).replace("-", "−");
  return signed && value > 0 ? `+${text}` : text;
}

/**
 * Format a share, such as 37 %.
 * @param {number | null | undefined} share
 */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const hundred = share * 100;
  if (hundred > 0 && hundred < 0.01) return `${hundred.toExponential(1)} %`;
  return `${Number(hundred.toPrecision(hundred >= 99.5 ? 4 : 3))} %`;
}

/**
 * @param {number} size characters or bytes
 */
export function bytes(size) {
  if (size < 1000) return `${size} B`;
  if (size < 1e6) return `${(size / 1e3).toFixed(size < 1e4 ? 1 : 0)} KB`;
  return `${(size / 1e6).toFixed(1)} MB`;
}

/**
 * Format a duration, such as 4.2 s, 3 min 20 s or 2 h 5 min.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/**
 * Format a time relative to now, such as 3 min ago.
 * @param {number} time seconds since 1970
 */
export function ago(time) {
  const passed = Date.now() / 1000 - time;
  if (passed < 1) return "now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 48 * 3600) return `${Math.floor(passed / 3600)} h ago`;
  return `${Math.floor(passed / 86400)} days ago`;
}

/**
 * Format a time in the reader's time zone, such as 2026-11-15 14:03:07.
 * @param {number} time
 */
export function clock(time) {
  const date = new Date(time * 1000);
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * Create a `<time>` that shows a relative time, with the exact time as its tooltip. `tick` keeps it up to date.
 * @param {number | null | undefined} time
 * @returns {HTMLElement}
 */
export function when(time) {
  if (!time) return el("span.muted", { text: NONE });
  const exact = new Date(time * 1000).toISOString();
  return el("time", { datetime: exact, title: `${clock(time)} (${exact})`, data: { since: time }, text: ago(time) });
}

/** Update every relative time on the page. `main.js` calls it every few seconds. */
export function tick() {
  for (const shown of document.querySelectorAll("time[data-since]")) {
    const text = ago(Number(shown.getAttribute("data-since")));
    if (shown.textContent !== text) shown.textContent = text;
  }
}

/**
 * Format a count with a noun, such as "1 turn" or "2 turns".
 * @param {number} amount
 * @param {string} one
 * @param {string} [many]
 */
export function plural(amount, one, many = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}
