// Redraws the map after a control changed. Arguments come from feature_map.py.
const data = source.data;
const n = data.id.length;
const [ix, iy, ic] = [Number(x.value), Number(y.value), Number(color.value)];
const words = find.value.trim().toLowerCase();
const alpha = new Float32Array(n);
for (let i = 0; i < n; i++) {
  const kept = data.state[i] === "kept";
  alpha[i] = kept || states.value !== "fade" ? 0.85 : 0.28;
  if (states.value === "kept" && !kept) alpha[i] = 0;
  if (states.value === "pruned" && kept) alpha[i] = 0;
  if (words !== "") {
    const text = `${data.source[i]}\n${data.cluster[i]}\n${data.prompt[i]}\n` +
      data.answer[i];
    if (alpha[i] > 0) alpha[i] = text.toLowerCase().includes(words) ? 1 : 0.06;
  }
}
source.data = {
  ...data,
  x: data[`axis${ix}`],
  y: data[`axis${iy}`],
  color: colors[ic],
  marker: markers[ic],
  alpha: alpha,
};
xaxis.axis_label = titles[ix];
yaxis.axis_label = titles[iy];
for (const [range, limit] of [[plot.x_range, limits[ix]], [plot.y_range, limits[iy]]]) {
  [range.start, range.end] = limit;
  [range.reset_start, range.reset_end] = limit;
}
const legend = document.getElementById("map-legend");
if (legend) legend.innerHTML = legends[ic];
