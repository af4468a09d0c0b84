/**
 * The scale of log-probabilities: six steps and one for "unknown", as the classes `p0` … `p5` and `p-none`. Their colors, in
 * `css/token_view.css`, differ in lightness, so that the order is visible without hues, in both themes.
 */

/** @type {{from: number, label: string}[]} */
export const STEPS = [
  { from: 0.9, label: "≥ 90 %" },
  { from: 0.5, label: "50–90 %" },
  { from: 0.2, label: "20–50 %" },
  { from: 0.05, label: "5–20 %" },
  { from: 0.005, label: "0.5–5 %" },
  { from: 0, label: "< 0.5 %" },
];

/**
 * Return the CSS class of a sampled token.
 * @param {number | null | undefined} logprob
 */
export function stepOf(logprob) {
  if (logprob === null || logprob === undefined) return "p-none";
  const probability = Math.exp(logprob);
  return `p${STEPS.findIndex((step) => probability >= step.from)}`;
}
