// Numbers and names as text. Text from records goes through safe() before plotly gets it: plotly reads some HTML in labels.
"use strict";
(() => {
  const safe = (text) =>
    String(text)
      .replace(/&/g, "&amp;")
      .replace(/</g, "&lt;")
      .replace(/>/g, "&gt;")
      .replace(/\{/g, "&#123;")
      .replace(/\$/g, "&#36;");
  // How plotly recognizes a trace between redraws. It is used in a selector, so it has only letters and digits.
  const uid = (...names) => names.join("-").replace(/[^\w-]/g, (character) => `_${character.codePointAt(0)}`);
  // A long text without its middle: the names of runs often differ only at their end.
  const clip = (text, most) => {
    const tail = Math.floor((most - 1) / 2);
    return text.length > most ? `${text.slice(0, most - 1 - tail)}…${text.slice(-tail)}` : text;
  };
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const seconds = (s) => (
    s === 0
      ? "0 s" : s >= 0.9995 ? `${+s.toPrecision(3)} s` : s >= 9.995e-4 ? `${+(s * 1e3).toPrecision(3)} ms`
      : `${+(s * 1e6).toPrecision(3)} µs`
  );
  const bytes = (n) => (
    n >= 2 ** 30
      ? `${+(n / 2 ** 30).toPrecision(3)} GiB` : n >= 2 ** 20 ? `${+(n / 2 ** 20).toPrecision(3)} MiB` : n >= 1024
      ? `${+(n / 1024).toPrecision(3)} KiB` : `${n} B`
  );
  const commas = (n) => n.toLocaleString("en-US", { maximumFractionDigits: Math.abs(n) < 100 ? 2 : 0 });
  const plain = (n) => (
    !isNumber(n)
      ? "–" : n === 0 ? "0" : Math.abs(n) >= 1e4 || (Number.isInteger(n) && Math.abs(n) >= 1e3) ? commas(n) : Math.abs(n) < 1e-4
      ? n.toExponential(2) : String(+n.toPrecision(5))
  );
  // A loss or an accuracy: four decimals, or four significant digits if it is very small or large.
  const figure = (n) => (n === 0 || (Math.abs(n) >= 1e-3 && Math.abs(n) < 1e4) ? n.toFixed(4) : n.toPrecision(4));
  // Rounded before it is divided, so that it never says 60 s.
  const time = (s) => {
    if (!isNumber(s)) return "–";
    if (s < 59.95) return s < 1 ? seconds(s) : `${s.toFixed(1)} s`;
    const [whole, large, small] = Math.round(s) < 3600 ? [Math.round(s), "min", "s"] : [Math.round(s / 60), "h", "min"];
    return `${Math.floor(whole / 60)} ${large}${whole % 60 ? ` ${whole % 60} ${small}` : ""}`;
  };
  // What the samples of these runs are called: "samples" if they differ.
  const unitOf = (sources) => {
    const all = new Set(sources.map((source) => source.unit || "samples"));
    return all.size === 1 ? [...all][0] : "samples";
  };

  Object.assign(window.Paceline, { safe, uid, clip, isNumber, seconds, bytes, commas, plain, figure, time, unitOf });
})();
