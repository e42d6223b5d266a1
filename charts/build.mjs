// Bundles the chart library of the pages into one file, with the licences of all it holds:
//   npm install && node build.mjs        (or `make charts`)
import { build } from "esbuild";
import { existsSync, readFileSync, writeFileSync } from "node:fs";

const target = "../gradscope/markup/charts.js";
const source = `
export { Error, parse, View } from "vega";
export { expressionInterpreter } from "vega-interpreter";
export { compile } from "vega-lite";
`;
const made = await build({
  stdin: { contents: source, resolveDir: "." },
  bundle: true, minify: true, write: false, metafile: true,
  format: "iife", globalName: "charts", legalComments: "none", charset: "ascii",
});
const names = new Set(Object.keys(made.metafile.inputs).map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1]).filter(Boolean));
const texts = new Map(); // licence text -> the packages under it
for (const name of [...names].sort()) {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"].map((one) => `node_modules/${name}/${one}`).find(existsSync);
  const text = file ? readFileSync(file, "utf8").trim() : `Licence: ${license}`;
  texts.set(text, [...(texts.get(text) ?? []), `${name} ${version} (${license})`]);
}
const licences = [...texts].map(([text, packages]) => `${packages.join(", ")}\n\n${text}`).join("\n\n----\n\n");
const banner = `/*! Charts: ${[...names].length} packages, made by charts/build.mjs.\n\n${licences.replaceAll("*/", "* /")}\n*/\n`;
writeFileSync(target, banner + made.outputFiles[0].text);
console.log(`${target}: ${(banner.length + made.outputFiles[0].text.length).toLocaleString()} bytes, ${names.size} packages`);
