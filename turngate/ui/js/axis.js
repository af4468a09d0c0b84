/** Where numbers stand on an axis, and which of them are written beside it. `chart.js` calls it. */

/**
 * A function from numbers to pixels.
 * @param {number} low
 * @param {number} high
 * @param {number} from pixels of `low`
 * @param {number} to pixels of `high`
 * @returns {(value: number) => number}
 */
export function scale(low, high, from, to) {
  const span = high - low || 1;
  const shift = high === low ? (to - from) / 2 : 0;
  return (value) => from + shift + ((value - low) / span) * (to - from);
}

/**
 * Round numbers from `low` to `high`: about `wanted` of them.
 * @param {number} low
 * @param {number} high
 * @param {number} wanted
 * @returns {number[]}
 */
export function nice(low, high, wanted) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  const ticks = [];
  for (let i = Math.floor(low / step); i <= Math.ceil(high / step); i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/** Steps of a clock, in seconds. */
const CLOCK = [1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/**
 * Times at which a clock would be looked at: about `wanted` of them.
 * @param {number} low seconds since 1970
 * @param {number} high
 * @param {number} wanted
 * @returns {number[]}
 */
export function times(low, high, wanted) {
  if (!(high > low)) return [low];
  const step = CLOCK.find((size) => size >= (high - low) / wanted) ?? CLOCK[CLOCK.length - 1];
  const zone = new Date(low * 1000).getTimezoneOffset() * 60; // whole hours where the reader is
  const found = [];
  for (let at = Math.ceil((low - zone) / step) * step + zone; at <= high; at += step) found.push(at);
  return found;
}
