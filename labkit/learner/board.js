// The board of a class. Whatever others wrote arrives as text and numbers, and is shown as text.

const h = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag)
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value)
  node.append(...children)
  return node
}
const say = (node, words) => { if (node.textContent !== words) node.textContent = words }

function render({ model, el }) {
  let asked = 0
  const ask = (type, given = {}) => { asked = Date.now(); model.send({ type, ...given }) }
  const button = (words, type) => {
    const node = h('button', { type: 'button', class: 'lk-button' }, words)
    node.addEventListener('click', () => { if (node.getAttribute('aria-disabled') !== 'true') ask(type) })
    return node
  }
  const title = h('p', { class: 'lk-headline' }), question = h('p', { class: 'lk-question' })
  const settings = h('p', { class: 'lk-note' }), said = h('p', { class: 'lk-sentence', 'aria-live': 'polite' })
  const alert = h('p', { class: 'lk-error', role: 'alert' }), table = h('table', { class: 'lk-board' })
  const discuss = button('Begin the second round', 'discuss'), reveal = button('Reveal the answer', 'reveal'), look = button('Look now', 'look')
  const larger = h('button', { type: 'button', class: 'lk-button lk-larger' }, 'Large type')
  larger.addEventListener('click', () => ask('projector', { on: !model.get('large') }))
  const root = h('div', { class: 'lk', role: 'group', 'aria-label': 'the board of the class' },
    title, question, settings, alert, h('div', { class: 'lk-top' }, discuss, reveal, look), said, table, larger)

  let drawn = ''
  function show() {
    const view = model.get('view')
    if (!view.rows) return
    say(title, view.title); say(question, view.question); say(settings, view.settings); say(said, view.said); say(alert, view.error)
    for (const [node, off] of [[discuss, view.second || view.revealed], [reveal, view.revealed]]) node.setAttribute('aria-disabled', off)
    discuss.classList.toggle('lk-primary', !view.second && !view.revealed)
    reveal.classList.toggle('lk-primary', view.second && !view.revealed)
    const rows = JSON.stringify([view.rows, view.second])
    if (rows === drawn) return
    drawn = rows
    const most = Math.max(1, ...view.rows.flatMap(row => [row.before, row.after]))
    const stroke = (count, kind) => h('span', { class: `lk-bar ${kind}`, 'aria-hidden': 'true', style: `--share: ${count / most}` })
    const bar = (count, kind) => h('td', {}, ...(count ? [stroke(count, kind)] : []), ` ${count}`)
    table.style.setProperty('--rounds', view.second ? 2 : 1)
    const heads = [view.unit ? `prediction (${view.unit})` : 'prediction', ...(view.second ? ['before', 'after'] : ['how many'])]
    table.replaceChildren(h('thead', {}, h('tr', {}, ...heads.map(word => h('th', { scope: 'col' }, word)))),
      h('tbody', {}, ...view.rows.map(row => h('tr', row.answer ? { class: 'lk-answer' } : {},
        h('th', { scope: 'row' }, row.label + (row.answer ? ' ← the answer' : '')),
        bar(row.before, 'lk-before'), ...(view.second ? [bar(row.after, 'lk-after')] : [])))))
  }

  const size = () => {
    root.classList.toggle('lk-large', model.get('large'))
    larger.setAttribute('aria-pressed', model.get('large'))
  }
  const heard = () => { asked = 0 }
  const timer = setInterval(() => {
    const waits = asked && Date.now() - asked < 10000
    if (!waits && root.isConnected && !document.hidden) ask('look')
  }, 1000)
  root.addEventListener('keydown', event => { if (!event.ctrlKey && !event.metaKey && !event.altKey) event.stopPropagation() })
  el.append(root)
  model.on('change:view', show); model.on('change:large', size); model.on('msg:custom', heard)
  show(); size()
  return () => { clearInterval(timer); model.off('change:view', show); model.off('change:large', size); model.off('msg:custom', heard) }
}

export default { render }
