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
