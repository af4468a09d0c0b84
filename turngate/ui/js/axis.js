/** Scales and ticks for the axes of a chart. */

/**
 * Return a function that maps numbers to pixels.
 * @param {number} low
 * @param {number} high
 * @param {number} from pixels of `low`
 * @param {number} to pixels of `high`
 * @returns {(value: number) => number}
 */
export function scale(low, high, from, to) {
  const span = high / 2 - low / 2 || 1; // halved first, because the full span may overflow
  const shift = high === low ? (to - from) / 2 : 0;
  return (value) => from + shift + ((value / 2 - low / 2) / span) * (to - from);
}

/** The smallest relative distance at which two values have distinct round numbers between them. */
const FINEST = 1e-11;

/**
 * Return about `wanted` round numbers from `low` to `high`, or just `low` and `high` if no distinct round numbers lie between them.
 * @param {number} low
 * @param {number} high
 * @param {number} wanted
 * @returns {number[]}
 */
export function nice(low, high, wanted) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [];
  if (!(high > low)) return [low];
  const span = high - low;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  const apart = span >= FINEST * Math.max(Math.abs(low), Math.abs(high));
  if (!apart || !Number.isFinite(span) || !(power > 0)) return [low, high];
  const first = Math.floor(low / step);
  const many = Math.min(Math.ceil(high / step) - first, 4 * wanted);
  return Array.from({ length: many + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12))).filter(
    Number.isFinite,
  );
}

/** Steps of a time axis, in seconds. */
const CLOCK = [1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/**
 * Return about `wanted` round times, such as full hours or minutes.
 * @param {number} low seconds since 1970
 * @param {number} high
 * @param {number} wanted
 * @returns {number[]}
 */
export function times(low, high, wanted) {
  if (!(high > low)) return Number.isFinite(low) ? [low] : [];
  const rough = (high - low) / wanted;
  const week = CLOCK[CLOCK.length - 1];
  const step = CLOCK.find((size) => size >= rough) ?? Math.ceil(rough / week) * week;
  const zone = new Date(low * 1000).getTimezoneOffset() * 60; // so that ticks are at whole hours in the reader's time zone
  const first = Math.ceil((low - zone) / step) * step + zone;
  return Array.from({ length: wanted + 2 }, (_, i) => first + i * step).filter((at) => at <= high);
}
