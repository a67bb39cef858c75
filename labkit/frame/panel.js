// One panel: native controls, the picture, the sentence. Python decides what is shown; this file shows it.

// A model's handle differs between initialize and render, and a lab may be shown twice: what both share is kept by uid.
const shared = new Map()

function share(model) {
  const uid = model.get('uid')
  if (!shared.has(uid)) {
    const client = Math.random().toString(36).slice(2)
    shared.set(uid, { client, sent: 0, waiting: 0, queue: [], bitmap: document.createElement('canvas'), seq: null })
  }
  return shared.get(uid)
}

// Commands wait until Python has shown the last ones; moves that wait are merged, so the kernel never falls behind.
function send(model, command) {
  const s = share(model), last = s.queue.at(-1)
  if (command.type === 'set' && last?.type === 'set') Object.assign(last.values, command.values)
  else s.queue.push(command)
  flush(model)
}

function flush(model) {
  const s = share(model)
  if (s.waiting || !s.queue.length) return
  s.waiting = ++s.sent
  model.send({ type: 'commands', client: s.client, seq: s.waiting, commands: s.queue.splice(0) })
}

function acknowledged(model) {
  const s = share(model)
  if ((model.get('page').ack?.[s.client] ?? 0) < s.waiting) return
  s.waiting = 0
  flush(model)
}

// The picture arrives as rectangles; a rectangle whose base is not what we hold asks for the whole.
function receive(model, el) {
  const s = share(model), frame = model.get('frame')
  if (!frame.size || frame.seq === s.seq) return
  if (frame.base !== null && frame.base !== s.seq) return model.send({ type: 'whole' })
  s.seq = frame.seq
  s.shown = frame
  if (frame.base === null) [s.bitmap.width, s.bitmap.height] = frame.size
  const pen = s.bitmap.getContext('2d')
  for (const p of (el && isDark(el) && frame.themes?.dark) || frame.patches) pen.putImageData(unpack(p), p.x, p.y)
  s.bitmap.dispatchEvent(new Event('drawn'))
}

// A rectangle is sent as runs of one colour: painted at once, where a PNG would be decoded some frames later.
function unpack({ width, height, colours, lengths }) {
  const words = view => new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength))
  const run = words(lengths), colour = words(colours), pixels = new Uint32Array(width * height)
  for (let i = 0, at = 0; i < run.length; i++) pixels.fill(colour[i], at, at += run[i])
  return new ImageData(new Uint8ClampedArray(pixels.buffer), width, height)
}

function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag)
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value)
    else if (value !== false && value != null) node.setAttribute(key, value === true ? '' : value)
  }
  node.append(...children)
  return node
}

const say = (node, words) => { if (node.textContent !== words) node.textContent = words }

// In sentences a number stays on one line with its name, its unit or its exponent.
const WHOLE = /(\S*\de-\d+\S*|[\d.,]+ (?:%|ms|kB|MB|KiB)\S*|\b\w = \S+)/
const write = (node, words) => {
  if (node.textContent === words) return
  node.replaceChildren(...words.split(WHOLE).map((part, at) => at % 2 ? h('span', { class: 'lk-whole' }, part) : part))
}

const digits = value => typeof value === 'number' ? String(+value.toPrecision(12)) : String(value ?? '')

// One control: a labelled range over declared values with an exact number field, a select, or a checkbox.
function control(spec, id, change) {
  const name = `${id}-${spec.name}`, unit = spec.unit ? ` ${spec.unit}` : ''
  const help = h('small', { id: `${name}-help`, class: 'lk-help', role: 'tooltip' }, spec.help)
  const label = h('label', { for: name }, spec.label)
  const row = (...parts) => h('div', { class: 'lk-control', 'data-name': spec.name }, ...parts, help)
  const set = value => change({ [spec.name]: value })
  if (spec.options) {
    const input = h('select', { id: name, 'aria-describedby': help.id, onchange: () => set(input.value) },
      ...spec.options.map(option => h('option', { value: option }, option)))
    const node = row(label, input)
    node.classList.toggle('lk-wide', spec.options.some(option => option.length > 20))
    return { node, update: value => { input.value = value } }
  }
  if (spec.switch) {
    const input = h('input', { id: name, type: 'checkbox', 'aria-describedby': help.id, onchange: () => set(input.checked) })
    return { node: row(h('span', { class: 'lk-switch' }, input, label)), update: value => { input.checked = value } }
  }
  const at = spec.positions, nearest = value => at.reduce((best, v, i) => Math.abs(v - value) < Math.abs(at[best] - value) ? i : best, 0)
  const exact = h('input', { type: 'number', step: 'any', class: 'lk-number', 'aria-label': `${spec.label}, exact value${unit && ' in' + unit}`,
    onchange: () => set(exact.value === '' ? null : Number(exact.value)) })
  const range = h('input', { id: name, type: 'range', min: 0, max: at.length - 1, step: 1, 'aria-describedby': help.id,
    oninput: () => { const value = at[range.value]; update(value); set(value) } })
  function update(value, rejected) {
    range.value = nearest(value)
    range.setAttribute('aria-valuetext', digits(value) + unit)
    exact.setAttribute('aria-invalid', rejected !== undefined)
    if (rejected === undefined) exact.value = digits(value)
    exact.style.width = `${Math.max(3.4, .6 * exact.value.length + 1.2)}em`
  }
  return { node: row(h('span', { class: 'lk-value' }, label, h('span', { class: 'lk-exact' }, exact, h('span', { class: 'lk-unit' }, spec.label.includes(spec.unit) ? '' : spec.unit))), range), update }
}

function tableOf(table) {
  const cells = (tag, values) => h('tr', {}, ...values.map(value => h(tag, tag === 'th' ? { scope: 'col' } : {}, value)))
  return h('table', {}, h('thead', {}, cells('th', table.columns)), h('tbody', {}, ...table.rows.map(row => cells('td', row))))
}

// Colours and sizes are read from where the panel stands, so that any host and any theme will do.
const numbers = colour => (colour.match(/[\d.]+/g) ?? []).map(Number)
const hex = rgb => '#' + rgb.slice(0, 3).map(v => Math.round(v).toString(16).padStart(2, '0')).join('')

function background(el) {
  for (let node = el; node; node = node.parentElement) {
    const [r, g, b, a = 1] = numbers(getComputedStyle(node).backgroundColor)
    if (a === 1 && r !== undefined) return [r, g, b]
  }
  return [255, 255, 255]
}

function ink(el) {
  const under = background(el), [r, g, b, a = 1] = numbers(getComputedStyle(el).color)
  return [r, g, b].map((v, i) => a * v + (1 - a) * under[i])
}

const isDark = el => background(el).reduce((a, b) => a + b) < ink(el).reduce((a, b) => a + b)

// On a projector all is drawn as on a page that is smaller by this, then shown larger: type and lines grow alike.
const zoom = model => model.get('large') ? 1.5 : 1

function watchPage(model, el, picture, stops) {
  let sent = '', timer = 0
  const tell = () => {
    el.style.colorScheme = isDark(el) ? 'dark' : 'light'
    const scale = zoom(model), width = Math.min(960, Math.floor(picture.clientWidth / scale / 20) * 20)
    const height = Math.floor((innerHeight - 330) / scale / 20) * 20  // with what stands above and below it
    if (width < 100) return
    const font = parseFloat(getComputedStyle(el).fontSize) / scale
    const page = { width, height: Math.max(height, 260), ratio: devicePixelRatio * scale, font, text: hex(ink(el)), background: hex(background(el)) }
    const look = JSON.stringify(page)
    if (look === sent) return
    sent = look
    model.send({ type: 'page', page })
  }
  const soon = () => { clearTimeout(timer); timer = setTimeout(tell, 120) }
  const size = new ResizeObserver(soon)
  size.observe(picture)
  const probe = h('span', { class: 'lk-probe', 'aria-hidden': 'true', ontransitionrun: soon })
  el.append(probe)
  const gone = new AbortController()
  const watchZoom = () => matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener('change', () => { soon(); watchZoom() }, { once: true, signal: gone.signal })
  watchZoom()
  requestAnimationFrame(tell)
  model.on('change:large', soon)
  stops.push(() => { model.off('change:large', soon); size.disconnect(); gone.abort(); clearTimeout(timer) })
}

function initialize({ model }) {
  const page = () => acknowledged(model)
  model.on('change:page', page)
  return () => { model.off('change:page', page); shared.delete(model.get('uid')) }
}

function render({ model, el }) {
  const id = 'lk' + Math.random().toString(36).slice(2), stops = [], s = share(model)
  const on = (event, act) => { model.on(event, act); stops.push(() => model.off(event, act)) }
  const press = (type, given = {}) => () => send(model, { type, ...given })
  const button = (words, act, kind = '') => h('button', { type: 'button', class: `lk-button ${kind}`, onclick: act }, words)

  const radio = (group, value, words) => {
    const input = h('input', { type: 'radio', name: `${id}-${group}`, value })
    const types = { mode: { type: 'mode', word: value }, experiment: { type: 'choose', name: value }, picture: { type: 'picture', name: value } }
    input.addEventListener('change', () => send(model, types[group]))
    return h('label', { class: 'lk-radio' }, input, words)
  }
  const tabs = h('fieldset', { class: 'lk-tabs' }), pictures = h('fieldset', { class: 'lk-pictures' })
  const modes = h('fieldset', { class: 'lk-modes' }, h('legend', { class: 'lk-hidden' }, 'Mode'), radio('mode', 'predict', 'predict first'), radio('mode', 'live', 'live'))
  const field = h('input', { id: `${id}-field`, type: 'number', step: 'any', class: 'lk-field', onkeydown: e => { if (e.key === 'Enter') predict() } })
  const question = h('label', { for: field.id }), unit = h('span', { class: 'lk-unit' })
  const predict = () => send(model, { type: 'predict', number: field.value === '' ? '' : Number(field.value) })
  const step = () => {
    const { prediction, primary } = model.get('page')
    const typed = field.value !== '' && Number(field.value) !== prediction
    if (typed && (primary === 'predict' || primary === 'step')) predict()
    send(model, { type: 'step' })
  }
  const buttons = { predict: button('Predict', predict), step: button('Step', step), reset: button('Reset', press('reset')) }
  const ask = h('span', { class: 'lk-ask' }, question, h('span', { class: 'lk-exact' }, field, unit))
  const top = h('div', { class: 'lk-top' }, modes, ask, ...Object.values(buttons))

  const headline = h('p', { class: 'lk-headline' }), canvas = h('canvas', { role: 'img', class: 'lk-canvas' })
  const score = h('p', { class: 'lk-score', 'aria-live': 'polite' }), sentence = h('p', { class: 'lk-sentence', 'aria-live': 'polite' })
  const notice = h('p', { class: 'lk-note lk-notice', role: 'status' })
  const alert = h('p', { class: 'lk-error', role: 'alert' }), note = h('p', { class: 'lk-note' })
  const bar = h('progress', { max: 1, 'aria-label': 'progress' }), left = h('span')
  const working = h('p', { class: 'lk-progress', hidden: true }, bar, left,
    button('Stop', () => model.send({ type: 'commands', commands: [{ type: 'stop' }] }), 'lk-primary'),
    h('small', {}, 'waits for a running cell'))
  const head = h('div', { class: 'lk-head' }, headline, score)
  const picture = h('div', { class: 'lk-picture' }, head, pictures, h('div', { class: 'lk-frame' }, canvas, alert), sentence, working, note, notice)
  const controls = h('div', { class: 'lk-controls' })
  const code = h('code'), numbersBox = h('div', { class: 'lk-table' })
  const copy = button('Copy', () => navigator.clipboard.writeText([...numbersBox.querySelectorAll('tr')].map(tr => [...tr.children].map(c => c.textContent).join('\t')).join('\n')))
  const numbersFold = h('details', {}, h('summary', {}, 'The numbers as a table'), numbersBox, copy)
  const larger = button('Large type', () => press('projector', { on: !model.get('large') })(), 'lk-larger')
  const codeFold = h('details', {}, h('summary', {}, 'The code that runs'), h('pre', { tabindex: 0, 'aria-label': 'the code that runs' }, code))
  const root = h('div', { class: 'lk', role: 'group', onkeydown: keep }, tabs, top, h('div', { class: 'lk-body' }, controls, picture), codeFold, numbersFold, larger)

  // JupyterLab's own shortcuts eat arrows and letters; running the cell and the browser's own keys still work.
  function keep(event) {
    if (!(event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === 'Enter'))) event.stopPropagation()
  }

  let parts = [], laid = ''
  function showSpec() {
    const spec = model.get('spec')
    if (!spec.controls) return
    root.setAttribute('aria-label', spec.title)
    tabs.hidden = spec.experiments.length < 2
    if (tabs.childElementCount !== spec.experiments.length + 1)
      tabs.replaceChildren(h('legend', { class: 'lk-hidden' }, 'Experiment'), ...spec.experiments.map(e => radio('experiment', e.name, e.title)))
    for (const input of tabs.querySelectorAll('input')) input.checked = input.value === spec.chosen
    pictures.hidden = spec.pictures.length < 2
    if ([...pictures.querySelectorAll('input')].map(i => i.value).join() !== spec.pictures.join())
      pictures.replaceChildren(h('legend', { class: 'lk-hidden' }, 'Picture'), ...spec.pictures.map(name => radio('picture', name, name)))
    for (const input of pictures.querySelectorAll('input')) input.checked = input.value === spec.picture
    modes.hidden = spec.long
    say(question, spec.question); say(unit, spec.unit); write(note, spec.note); say(code, spec.source)
    if (laid === spec.chosen) return  // another picture of the same experiment
    laid = spec.chosen
    parts = spec.controls.map(c => ({ name: c.name, ...control(c, id, values => send(model, { type: 'set', values })) }))
    const seldom = parts.filter((_, at) => spec.controls[at].seldom)
    const names = seldom.map(part => part.node.querySelector('label').textContent)
    const more = h('details', { class: 'lk-more' }, h('summary', {}, `more: ${names.join(', ')}`), ...seldom.map(part => part.node))
    controls.replaceChildren(...parts.filter(part => !seldom.includes(part)).map(part => part.node), ...seldom.length ? [more] : [])
    field.value = ''
  }

  function showSize() {
    root.classList.toggle('lk-large', model.get('large'))
    larger.setAttribute('aria-pressed', model.get('large'))
  }

  let asked
  function showPage() {
    const page = model.get('page')
    if (!page.values) return
    if (!s.queue.length && !s.waiting) {
      for (const part of parts) if (part.name in page.values) part.update(page.values[part.name], page.rejected[part.name])
    }
    for (const input of modes.querySelectorAll('input')) input.checked = input.value === page.mode
    ask.hidden = buttons.predict.hidden = buttons.step.hidden = page.mode === 'live'
    if (asked !== page.prediction && (page.prediction != null || asked != null)) field.value = digits(page.prediction)
    asked = page.prediction
    for (const [name, node] of Object.entries(buttons)) {
      node.classList.toggle('lk-primary', page.primary === name)
      node.setAttribute('aria-disabled', Boolean(page.progress))
    }
    write(headline, page.headline); write(sentence, page.sentence); write(score, page.score); say(alert, page.error); say(notice, page.notice)
    canvas.setAttribute('aria-label', page.sentence)
    root.classList.toggle('lk-wrong', page.error !== '')
    working.hidden = !page.progress
    if (page.progress) { bar.value = page.progress.fraction; say(left, page.progress.words) }
    numbersFold.hidden = codeFold.hidden = !page.tables.length
    numbersBox.replaceChildren(...page.tables.map(tableOf))
  }

  function paint() {
    if (!s.shown) return
    canvas.width = s.bitmap.width; canvas.height = s.bitmap.height
    canvas.style.width = s.shown.css[0] * zoom(model) + 'px'
    canvas.getContext('2d').drawImage(s.bitmap, 0, 0)
    canvas.dataset.seq = s.shown.seq
  }

  el.append(root)
  on('change:spec', () => { showSpec(); showPage() })
  on('change:page', showPage)
  on('change:large', showSize)
  on('change:frame', () => receive(model, root))
  on('comm_live_update', () => { root.classList.add('lk-gone'); say(alert, 'The kernel behind this panel is gone: run this cell again.') })
  s.bitmap.addEventListener('drawn', paint)
  stops.push(() => s.bitmap.removeEventListener('drawn', paint))
  showSpec(); showPage(); showSize(); paint(); receive(model, root)
  watchPage(model, root, picture, stops)
  return () => stops.forEach(stop => stop())
}

export default { initialize, render }
